"""One generation, and a stream with a seed. MOLINK_INITIAL_PEERS says where the swarm is."""

from molink import Swarm

with Swarm("molink/tiny-shakespeare") as swarm:
    result = swarm.generate("ROMEO:", max_new_tokens=32)
    print(result.text)
    print(f"{len(result.token_ids)} tokens, the first after {result.ttft_s:.2f} s, {result.finish_reason}")
    for hop in result.circuit.hops:
        print(f"layers {hop.start} to {hop.stop} on {hop.name or hop.peer_id}")

    for piece in swarm.stream("JULIET:", max_new_tokens=32, temperature=0.8, top_p=0.9, seed=7):
        print(piece, end="", flush=True)
    print()

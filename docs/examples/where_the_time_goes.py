"""The time of a token, hop by hop: what the router predicted and what was measured."""

from molink import Swarm

with Swarm("molink/tiny-shakespeare") as swarm:
    explanation = swarm.explain("ROMEO:", max_new_tokens=32)

print(
    f"predicted {explanation.predicted_tpot_ms:.2f} ms a token, measured {explanation.measured_tpot_ms:.2f} ms"
)
for times in explanation.hops:
    print(
        f"layers {times.hop.start}:{times.hop.stop}: computing {times.predicted_compute_ms:.2f} ms predicted, "
        f"{times.measured_compute_ms:.2f} ms measured; link {times.predicted_link_ms:.2f} ms predicted, "
        f"{times.measured_link_ms:.2f} ms measured"
    )

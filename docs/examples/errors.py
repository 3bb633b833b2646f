"""What can go wrong, each error with fields beside its sentence."""

from molink import InvalidRequest, ModelNotFound, Swarm

try:
    with Swarm("a-model/that-nobody-serves") as swarm:
        swarm.generate("Hello")
except ModelNotFound as error:
    print(f"not served: {error.model}")

with Swarm("molink/tiny-shakespeare") as swarm:
    try:
        swarm.generate("ROMEO:", temperature=-1)
    except InvalidRequest as error:
        print(f"change {error.parameter}: {error}")

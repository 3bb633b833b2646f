"""What a peer would measure of a device that nobody has here. Pure."""

from molink.dht.records.records import LayerLatency, PrefillLatency
from molink.peer.profiling.profile import PIECE_TOKENS, Profile, SliceLatency
from molink.shards.spec import Span
from molink.simnet.devices.devices import DeviceProfile, SequenceChunk
from molink.simnet.devices.model_shapes import ModelShape

_LOAD_BYTES_PER_S = 2e9
_PROFILED_BATCHES = (1, 2, 4, 8, 16, 32, 64)
_PROFILED_PROMPTS = (64, 128, 256, 512, 1024, 2048)
_PROFILED_CONTEXT = 512


def timed_profile(shape: ModelShape, device: DeviceProfile) -> Profile:
    """The profile of a peer whose steps take what the device's do."""
    middle = Span(1, 2) if shape.layers > 2 else Span(0, 1)

    def layer_ms(batch: int) -> float:
        chunks = [SequenceChunk(1, _PROFILED_CONTEXT)] * batch
        return 1000 * (device.compute_s(shape, middle, chunks, 0) - device.step_s)

    def prompt_ms(tokens: int) -> float:
        return 1000 * (device.compute_s(shape, middle, [SequenceChunk(tokens, 0)], 0) - device.step_s)

    def slice_ms(tokens: int, context: int) -> float:
        return 1000 * device.compute_s(shape, middle, [SequenceChunk(tokens, context)], 0)

    last = Span(shape.layers - 1, shape.layers)
    one = [SequenceChunk(1, _PROFILED_CONTEXT)]
    head_s = device.compute_s(shape, last, one, 1) - device.compute_s(shape, last, one, 0)
    return Profile(
        layer_latencies=tuple(LayerLatency(batch, layer_ms(batch)) for batch in _PROFILED_BATCHES),
        embed_ms=1000 * device.step_s,
        head_ms=1000 * (head_s + device.step_s),
        load_bytes_per_s=_LOAD_BYTES_PER_S,
        prefill_latencies=tuple(PrefillLatency(tokens, prompt_ms(tokens)) for tokens in _PROFILED_PROMPTS),
        slice_latencies=tuple(
            SliceLatency(tokens, slice_ms(tokens, 0), slice_ms(tokens, 1000) - slice_ms(tokens, 0))
            for tokens in PIECE_TOKENS
        ),
    )

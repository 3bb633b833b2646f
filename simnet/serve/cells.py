"""Cells of a serving table as simulated circuits."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from molink.simnet.core.matrices import RttMatrix, latencies_between, mean_link_ms
from molink.simnet.devices.model_shapes import even_spans, shape_named
from molink.simnet.devices.named_devices import device_named
from molink.simnet.serve.presets import Preset, PresetCell
from molink.simnet.serve.scenario import Scenario, SimulatedStage, circuit_plan
from molink.simnet.serve.simulated import RequestLoad, SimulatedRun, simulate_serving


@dataclass(frozen=True, slots=True)
class Circuits:
    """Of a table. Can be pickled: cells run in processes of their own."""

    by_peers: Mapping[int, Scenario]
    """Circuits of so many peers; lines are those of the first cell."""
    load: RequestLoad
    """At any rate."""

    def scenario(self, cell: PresetCell) -> Scenario:
        """The cell's circuit with the cell's lines."""
        lines = cell.setting
        circuit = self.by_peers[cell.peers]
        return replace(circuit, bandwidth_mbps=lines.bandwidth_mbps, delay_ms=lines.delay_ms)

    def run(self, cell: PresetCell) -> SimulatedRun:
        """Serves the load at the cell's rate."""
        load = replace(self.load, rate_rps=cell.setting.rate_rps)
        return simulate_serving(self.scenario(cell), cell.policy, cell.served_as, load)


def in_regions(table: Preset, matrix: RttMatrix) -> Preset:
    """The table with machines in the matrix's regions: each setting once, the delay being the mean of the circuit's
    links. The papers print nothing of that."""
    cells = [
        replace(
            cell,
            setting=replace(cell.setting, delay_ms=mean_link_ms(latencies_between(matrix, cell.peers))),
            printed=None,
        )
        for cell in table.cells
    ]
    return replace(table, cells=tuple(dict.fromkeys(cells)))


def circuits_of(
    table: Preset, load: RequestLoad, software_ms: float, seed: int, matrix: RttMatrix | None = None
) -> Circuits:
    """What the cells of a table run on; with a matrix, machines are in its regions.

    Raises:
        ValueError: the model does not fit, or does not split; one sentence.
    """
    shape = replace(shape_named(table.model), tensors_per_boundary=table.tensors_per_boundary)
    device = device_named(table.device)
    by_peers = {}
    for cell in table.cells:
        if cell.peers not in by_peers:
            stages = tuple(SimulatedStage(device, span) for span in even_spans(shape.layers, cell.peers))
            lines = cell.setting
            scenario = Scenario(
                shape,
                stages,
                lines.bandwidth_mbps,
                lines.delay_ms,
                software_ms,
                seed=seed,
                latency_ms=None if matrix is None else latencies_between(matrix, cell.peers),
            )
            circuit_plan(scenario, cell.policy, cell.served_as)
            by_peers[cell.peers] = scenario
    return Circuits(by_peers, load)

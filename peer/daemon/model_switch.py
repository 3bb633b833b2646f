"""Model switch: an operator orders a peer to serve another model, which it then joins with, or goes back. Pure."""

from dataclasses import dataclass, replace

from molink.peer.daemon.settings import JoinSettings


@dataclass(slots=True)
class ModelSwitch:
    """Model switch: what a peer is to serve next, and what it served before."""

    wanted: str | None = None
    """The model that is to be served once the sessions of this one have ended."""
    before: JoinSettings | None = None
    """Those to go back to, until the peer serves what was ordered."""
    reason: str | None = None
    """Why the last one that was ordered is not served."""

    def order(self, model: str) -> None:
        """The operator orders that model."""
        self.wanted, self.reason = model, None

    def cancel(self) -> None:
        """The peer leaves for good."""
        self.wanted = None

    def next_settings(self, settings: JoinSettings) -> JoinSettings | None:
        """Returns those to join with now that the peer with these `settings` has left; None: it stays away.

        Which layers, and under which name, is what its owner has said of the model before.
        """
        model, self.wanted = self.wanted, None
        if model is None:
            return None
        self.before = settings
        return replace(
            settings,
            options=replace(settings.options, model=model, model_name=None, layers=None),
            layers=None,
        )

    def stand(self) -> None:
        """The peer serves."""
        self.before = None

    def go_back(self, model: str, reason: str) -> JoinSettings | None:
        """What was ordered cannot be served. Returns the settings from before; None: there are none, or the peer had
        served what was ordered."""
        before, self.before = self.before, None
        if before is not None:
            self.reason = f"{model} cannot be served: {reason.rstrip('.')}"
        return before

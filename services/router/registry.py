"""Who is there: instances by their heartbeats, and who of them can work together. Pure: time comes in as an argument.

An instance is known by its name; an announcement by another incarnation replaces it, and whatever ran on the old one is
lost. Silence means death only while this router itself can hear: see `pardon`.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from typing import Literal

import msgspec

from services.router.tally import Tally
from shared.errors import PairMismatch
from shared.kv.shards import layouts_fit
from shared.layout import KvLayout
from shared.messages import PROTOCOL, Announce, InstanceRef, Load, ModelIdentity, Role, Verify

log = logging.getLogger(__name__)

_RETIRED = 256
"""How many ended incarnations are remembered, so that their late messages bring nothing back."""


class Kind(msgspec.Struct, frozen=True):
    """What decides with whom an instance works: where protocol, model digest, layout, verification and drafter are equal and
    the shardings fit."""

    protocol: int
    model: str
    layout: KvLayout
    tp: int
    verify: Verify = "no"
    drafter: str = ""

    def feeds(self, decoder: Kind) -> bool:
        """Whether a prefiller of this kind works with a decoder of that."""
        ours = (self.protocol, self.model, self.layout, self.verify, self.drafter)
        same = ours == (decoder.protocol, decoder.model, decoder.layout, decoder.verify, decoder.drafter)
        return same and layouts_fit(self.layout, self.tp, decoder.tp)


class Instance:
    """One incarnation: its last announcement, and what this router knows beyond it."""

    __slots__ = ("announce", "beats", "full", "half_open", "heard_at", "kind", "picked", "probe", "tally", "wary")

    def __init__(self, announce: Announce, now: float) -> None:
        self.announce = announce
        self.kind = kind_of(announce)
        self.heard_at = now
        self.beats = 1
        self.full = False
        """It refused as busy since its last heartbeat."""
        self.wary = False
        """It refused as busy, and has taken nothing since: it gets one at a time, lest a whole line runs against it."""
        self.half_open = False
        """An attempt has failed on it, or it has died and is back: it gets one at a time until a token comes of one."""
        self.probe: str | None = None
        """That attempt, where it is half open."""
        self.picked = 0
        """When it was last chosen, in choices: equals take turns."""
        self.tally = Tally()

    @property
    def ref(self) -> InstanceRef:
        return self.announce.instance

    @property
    def load(self) -> Load:
        return self.announce.load

    @property
    def role(self) -> Role:
        return self.announce.role

    @property
    def ready(self) -> bool:
        return self.announce.state == "ready"

    def refused(self) -> None:
        """It said that it is busy."""
        self.full = self.wary = True

    def renew(self, announce: Announce, now: float) -> None:
        self.announce = announce
        self.kind = kind_of(announce)
        self.heard_at = now
        self.beats += 1
        self.full = False
        self.tally.heartbeat()


def kind_of(announce: Announce) -> Kind:
    return Kind(
        announce.protocol, announce.model.digest, announce.layout, announce.tp, announce.verify, announce.drafter
    )


def fitting_kinds(decoders: Sequence[Instance], prefillers: Sequence[Instance]) -> list[tuple[Kind, Kind]]:
    """Each (decoders', prefillers') pair of kinds that work together."""
    feeding = {known.kind for known in prefillers}
    return [(fed, kind) for fed in {known.kind for known in decoders} for kind in feeding if kind.feeds(fed)]


class Registry:
    """All instances, for one served model."""

    def __init__(self, model: ModelIdentity, dead_after_s: float) -> None:
        self._model = model
        self._dead_after_s = dead_after_s
        self._by_name: dict[tuple[Role, str], Instance] = {}
        self._retired: OrderedDict[InstanceRef, None] = OrderedDict()
        self._failed: set[tuple[Role, str]] = set()
        """Those that ended without leaving: they come back half open."""
        self._said: set[str] = set()
        self._paired_at: float | None = None
        self.decoders: list[Instance] = []
        """Ready ones of this router's model and protocol."""
        self.prefillers: list[Instance] = []
        """The same."""

    def observe(self, announce: Announce, now: float) -> list[tuple[InstanceRef, str]]:
        """Takes in a heartbeat; gives the incarnations that it ended, and how."""
        self._note_pair(now)
        ref = announce.instance
        if ref in self._retired:
            return []
        key = (announce.role, ref.name)
        known = self._by_name.get(key)
        ended: list[tuple[InstanceRef, str]] = []
        if known is not None and known.ref != ref:
            log.info("%s %s started anew: %016x replaces %016x", *key, ref.incarnation, known.ref.incarnation)
            ended.append((self._retire(key), "was restarted"))
            self._failed.add(key)
            known = None
        if announce.state == "left":
            if known is not None:
                log.info("%s %s has left", *key)
                if known.ready:
                    self._failed.add(key)
                ended.append((self._retire(key), "has left"))
            self._sort()
            return ended
        if known is None:
            log.info("%s %s is there: %016x, %s", *key, ref.incarnation, announce.state)
            self._by_name[key] = Instance(announce, now)
            self._by_name[key].half_open = key in self._failed
            self._failed.discard(key)
            self._sort()
        else:
            changed = known.announce.state != announce.state or known.kind != kind_of(announce)
            known.renew(announce, now)
            if changed:
                self._sort()
        return ended

    def sweep(self, now: float) -> list[InstanceRef]:
        """Drops those that were silent for too long; they may come back with the same incarnation."""
        self._note_pair(now)
        dead = [key for key, known in self._by_name.items() if now - known.heard_at > self._dead_after_s]
        for key in dead:
            log.warning("%s %s is silent for %.1f s: counted as dead", *key, now - self._by_name[key].heard_at)
        lost = [self._by_name.pop(key).ref for key in dead]
        self._failed.update(dead)
        if lost:
            self._sort()
        return lost

    def paired_within(self, seconds: float, now: float) -> bool:
        """Whether there was a working pair at some time in the last `seconds`."""
        return self._paired_at is not None and now - self._paired_at < seconds

    def _note_pair(self, now: float) -> None:
        if self.missing() is None:
            self._paired_at = now

    def pardon(self, now: float) -> None:
        """This router could not hear until now: everyone's silence counts from here."""
        for known in self._by_name.values():
            known.heard_at = now

    def stale(self, ref: InstanceRef) -> None:
        """This incarnation said, or was said, to be replaced: it is not used again."""
        for key, known in list(self._by_name.items()):
            if known.ref == ref:
                self._retire(key)
                self._sort()

    def draining(self, ref: InstanceRef) -> None:
        """It refused because it drains; its announcement is on the way."""
        self.decoders = [known for known in self.decoders if known.ref != ref]
        self.prefillers = [known for known in self.prefillers if known.ref != ref]

    def find(self, ref: InstanceRef) -> Instance | None:
        for known in self._by_name.values():
            if known.ref == ref:
                return known
        return None

    @property
    def instances(self) -> list[Instance]:
        return list(self._by_name.values())

    def mismatches(self) -> list[str]:
        """Why instances that are there are never paired; each names both values."""
        foreign = [text for known in self._by_name.values() if (text := self._foreign(known.announce)) is not None]
        pairs = [
            f"prefill {p.ref.name} and decode {d.ref.name}: {mismatch}"
            for p in self.prefillers
            for d in self.decoders
            if (mismatch := mismatch_of(p.announce, d.announce)) is not None
        ]
        return foreign + pairs

    def missing(self) -> str | None:
        """Why there is no working pair; None where there is one."""
        if fitting_kinds(self.decoders, self.prefillers):
            return None
        if self.prefillers and self.decoders:
            return "no prefill and decode instance fit together: " + "; ".join(self.mismatches())
        lacking = [self._lacking("decode", self.decoders), self._lacking("prefill", self.prefillers)]
        return "; ".join(text for text in lacking if text)

    def _lacking(self, role: Literal["prefill", "decode"], usable: list[Instance]) -> str:
        if usable:
            return ""
        there = [known.announce for known in self._by_name.values() if known.role == role]
        if not there:
            return f"no {role} instance is there"
        reasons = [self._foreign(announce) or f"{announce.instance.name} is {announce.state}" for announce in there]
        return f"no {role} instance is usable ({'; '.join(reasons)})"

    def _foreign(self, announce: Announce) -> str | None:
        """Why this router cannot use the instance at all."""
        if announce.protocol != PROTOCOL:
            field, theirs, ours = "protocol", str(announce.protocol), str(PROTOCOL)
        elif announce.model.digest != self._model.digest:
            field, theirs, ours = "model", _model(announce.model), _model(self._model)
        else:
            return None
        return f"{field} differs: {announce.role} {announce.instance.name} has {theirs}, this router has {ours}"

    def _retire(self, key: tuple[Role, str]) -> InstanceRef:
        ref = self._by_name.pop(key).ref
        self._retired[ref] = None
        while len(self._retired) > _RETIRED:
            self._retired.popitem(last=False)
        return ref

    def _sort(self) -> None:
        usable = [known for known in self._by_name.values() if known.ready and self._foreign(known.announce) is None]
        self.decoders = [known for known in usable if known.role == "decode"]
        self.prefillers = [known for known in usable if known.role == "prefill"]
        now = set(self.mismatches())
        for text in sorted(now - self._said):
            log.warning("never paired: %s", text)
        self._said = now


def mismatch_of(prefiller: Announce, decoder: Announce) -> PairMismatch | None:
    """The first thing in which two instances differ and must not; None where they work together."""
    if prefiller.protocol != decoder.protocol:
        return PairMismatch("protocol", prefiller.protocol, decoder.protocol)
    if prefiller.model.digest != decoder.model.digest:
        return PairMismatch("model", _model(prefiller.model), _model(decoder.model))
    if prefiller.drafter != decoder.drafter:
        return PairMismatch("speculate", prefiller.drafter or "no drafter", decoder.drafter or "no drafter")
    for field in KvLayout.__struct_fields__:
        ours, theirs = getattr(prefiller.layout, field), getattr(decoder.layout, field)
        if ours != theirs:
            return PairMismatch(f"layout.{field}", ours, theirs)
    if prefiller.verify != decoder.verify:
        return PairMismatch("verify", prefiller.verify, decoder.verify)
    heads = decoder.layout.num_kv_heads
    if not layouts_fit(decoder.layout, prefiller.tp, decoder.tp):
        return PairMismatch("tp", *(f"{tp} for {heads} KV heads" for tp in (prefiller.tp, decoder.tp)))
    return None


def _model(model: ModelIdentity) -> str:
    return f"{model.name} ({model.digest})"

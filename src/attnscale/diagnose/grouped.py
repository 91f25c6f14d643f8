"""Findings that say the same of many layers, told once."""

from collections.abc import Sequence
from dataclasses import dataclass

from attnscale.diagnose.finding import Finding, severity_rank
from attnscale.plain import printable


@dataclass(frozen=True)
class Group:
    """Findings of one code and one severity, as they were found: the first speaks for all."""

    findings: tuple[Finding, ...]

    @property
    def first(self) -> Finding:
        """The one that is told."""
        return self.findings[0]

    @property
    def layers(self) -> tuple[str, ...]:
        """The layers meant, each once."""
        return tuple(dict.fromkeys(finding.layer for finding in self.findings))

    @property
    def others(self) -> str:
        """What the first leaves out: `and 3 more heads in 2 layers`; empty where it is the only one."""
        more = len(self.findings) - 1
        if more == 0:
            return ""
        by_head = any(finding.head is not None for finding in self.findings)
        what = f"{more} more {'head' if by_head else 'layer'}{'s' if more > 1 else ''}"
        return f"and {what}" if not by_head or len(self.layers) == 1 else f"and {what}, in {len(self.layers)} layers"

    def __str__(self) -> str:
        first = self.first
        place = f"{first.place}{f' {self.others}' if self.others else ''}"
        return printable(f"{first.severity}: {place}: {first.code}: {first.message} {first.advice}")

    def where(self, layers: int) -> str:
        """The layer and its heads where it is one, else of how many of all layers it is."""
        if len(self.layers) > 1:
            return f"{len(self.layers)} of {layers} layers"
        heads = [str(finding.head) for finding in self.findings if finding.head is not None]
        which = f", {'head' if len(heads) == 1 else 'heads'} {', '.join(heads)}" if heads else ""
        return f"{self.layers[0]}{which}"


def grouped(findings: Sequence[Finding]) -> tuple[Group, ...]:
    """Groups by code and severity: the worst first, then the one that concerns most layers."""
    found: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        found.setdefault((finding.code, finding.severity), []).append(finding)
    groups = [Group(tuple(same)) for same in found.values()]
    return tuple(sorted(groups, key=lambda group: (-severity_rank(group.first.severity), -len(group.layers))))

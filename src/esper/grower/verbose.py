"""A line per decision, for whoever watches the training's output."""

from __future__ import annotations

import sys

from esper.grower.recording import Account


def say(account: Account) -> None:
    """Print what was decided, and on what."""
    sys.stdout.write(f"{line(account)}\n")
    sys.stdout.flush()


def line(account: Account) -> str:
    """``decision 7: germinate mlp in layer2; loss 0.4123 (training 0.3987), accuracy 0.873; layer2 +0.012``."""
    loss = f"loss {account.decision.loss:.4g} (training {account.train_loss:.4g})"
    earned = ", ".join(f"{slot} {value:+.3g}" for slot, value in account.decision.contributions.items())
    decided = f"decision {account.decision.number}: {account.decision.what}"
    return "; ".join(filter(None, [decided, f"{loss}{account.decision.measured}", earned]))

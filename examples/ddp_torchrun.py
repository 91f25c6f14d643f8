"""Train one model with DDP in two processes; each measures its own rows, and rank 0 records the whole batch.

torchrun --nproc-per-node 2 examples/ddp_torchrun.py
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import attnscale
from attnscale.models import CausalTransformer
from attnscale.models.text import VOCABULARY, default_text, encode
from attnscale.train import Record

LENGTH, BATCH, STEPS = 65, 8, 12


def main() -> None:
    """Train for a few steps, then print the merged records."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(CausalTransformer(VOCABULARY, d_model=64, layers=2, heads=2))
    optimiser = torch.optim.Adam(model.parameters(), 3e-3)
    records: list[Record] = []
    monitor = attnscale.Monitor(model, every=4, rows=None, sinks=[records.append])  # create it on every rank

    rows = encode(default_text())[: BATCH * STEPS * LENGTH].view(STEPS, BATCH, LENGTH)
    for step in range(STEPS):
        tokens = rows[step].chunk(ranks)[rank]  # its share of the batch
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        monitor.step()
    monitor.close()

    if rank > 0:
        assert not records  # rank 0 has the records
    else:
        print(f"{ranks} ranks trained; rank 0 wrote {len(records)} records")
        for record in records:
            layers = record.layers.values()
            print(
                f"step {record.step}: {sum(layer.rows for layer in layers)} rows of {record.ranks} ranks, "
                f"largest score {max(layer.whole('max') for layer in layers):.2f}, "
                f"lowest entropy {min(layer.whole('entropy_ratio') for layer in layers):.0%} of its maximum"
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" not in os.environ:
        raise SystemExit("Run it as: torchrun --nproc-per-node 2 examples/ddp_torchrun.py")
    main()

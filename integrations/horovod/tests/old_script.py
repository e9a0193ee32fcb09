"""A training script as they were written for Horovod; nothing in it knows of hvdp."""

import argparse

import horovod
import horovod.torch as hvd
import torch
import torch.nn.functional as F
from horovod.common.exceptions import HorovodInternalError
from horovod.common.util import gpu_available
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--fp16-allreduce", action="store_true")
    parser.add_argument("--use-adasum", action="store_true")
    return parser.parse_args()


def metric_average(value: float, name: str) -> float:
    return hvd.allreduce(torch.tensor(value), name=name).item()


def train(epoch: int) -> float:
    model.train()
    sampler.set_epoch(epoch)
    total = 0.0
    for data, target in loader:
        optimizer.zero_grad()
        loss = F.mse_loss(model(data), target)
        loss.backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        with optimizer.skip_synchronize():
            optimizer.step()
        total += loss.item()
    return metric_average(total / len(loader), "avg_loss")


args = parse_arguments()
hvd.init()
torch.manual_seed(17 + hvd.rank())
if gpu_available("torch") and hvd.nccl_built():
    torch.cuda.set_device(hvd.local_rank())
torch.set_num_threads(1)

everywhere = torch.Generator().manual_seed(3)
inputs = torch.randn(256, 8, generator=everywhere)
dataset = TensorDataset(inputs, inputs @ torch.randn(8, 1, generator=everywhere))
sampler = DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank())
loader = DataLoader(dataset, batch_size=args.batch_size, sampler=sampler)

model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
scale = 1 if args.use_adasum else hvd.size()
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * scale, momentum=0.9)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
optimizer = hvd.DistributedOptimizer(
    optimizer,
    named_parameters=model.named_parameters(),
    compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
    op=hvd.Adasum if args.use_adasum else hvd.Average,
)

try:
    losses = [train(epoch) for epoch in range(args.epochs)]
except HorovodInternalError as error:
    raise SystemExit(f"the job is broken: {error}") from error

weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
everyones = hvd.allgather(weights.unsqueeze(0), name="weights")
same = all(torch.equal(everyones[0], row) for row in everyones)
if hvd.rank() == 0:
    print(f"horovod {horovod.__version__} ranks {hvd.size()} same {same} falls {losses[-1] < losses[0] / 2}")
hvd.shutdown()

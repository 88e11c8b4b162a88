"""torch.distributed from its beginnings: processes, messages, groups, collectives, a ring all-reduce, and data-parallel SGD by hand.

`python examples/distributed_basics.py --ranks 4` starts a process per rank. Each rank checks each result; rank 0 prints a line once all
have passed. A real job starts its processes with torchrun, and leaves gradients to DistributedDataParallel or fully_shard.
"""

from __future__ import annotations

import argparse
import copy
import math
import os
import random
import socket
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn, tensor

HOST = "127.0.0.1"


def check(passed: bool, line: str) -> None:
    """Prints the line once every rank has passed; a rank that has not ends the program."""
    assert passed, line
    dist.barrier()  # no rank goes on before all are here
    if dist.get_rank() == 0:
        print(line, flush=True)


def serve() -> dist.TCPStore:
    """Opens a store (a dictionary that other processes reach over TCP) for this machine alone, on a free port that the system picks."""
    listener = socket.create_server((HOST, 0))
    port, fd = listener.getsockname()[1], listener.detach()
    # the store takes over the socket, so no other program gets the port; multi_tenant: env:// and tcp:// in this process share the server
    return dist.TCPStore(HOST, port, is_master=True, wait_for_workers=False, multi_tenant=True, master_listen_fd=fd)


def init_methods(rank: int, size: int, backend: str, store: dist.Store, folder: str) -> None:
    """Forms a group in four ways; the last one stays. In each, all ranks know a place to leave an address and to read the others'."""
    # Rank 0 hosts env:// and tcp://; a real job agrees on a port before. Two servers: the first group's keys would mislead the second.
    if rank == 0:
        servers = [serve(), serve()]
        store.set("ports", " ".join(str(server.port) for server in servers))
    env_port, tcp_port = store.get("ports").decode().split()  # waits for rank 0
    os.environ.update(MASTER_ADDR=HOST, MASTER_PORT=env_port, RANK=str(rank), WORLD_SIZE=str(size))
    ways: dict[str, dict] = {
        "env://": {},  # the default: reads the four variables, which torchrun sets
        "tcp://": {"init_method": f"tcp://{HOST}:{tcp_port}", "rank": rank, "world_size": size},
        "file://": {"init_method": f"file://{folder}/new", "rank": rank, "world_size": size},  # on a shared disk
        "store": {"store": dist.PrefixStore("group", store), "rank": rank, "world_size": size},  # a prefix for its keys
    }
    for name, way in ways.items():
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group(backend, **way)
        dist.all_reduce(total := tensor([rank]))
        check(total.item() == sum(range(size)), f"{name}: {size} ranks form a group with {backend}")
    store.add("arrived", 1)
    dist.barrier()
    check(store.add("arrived", 0) == size, f"barrier: {size} ranks wait for each other")


def point_to_point(rank: int, size: int) -> None:
    """Sends tensors from one rank to one other. The receiver provides the memory, so it has to know shape and type."""
    total = tensor([0])
    if rank > 0:
        dist.recv(total, src=rank - 1)  # blocks until the data is here
    total += rank
    if rank < size - 1:
        dist.send(total, dst=rank + 1)
    check(total.item() == sum(range(rank + 1)), f"send, recv: a sum passes through {size} ranks")

    token = tensor([7 if rank == 0 else 0])
    requests = [dist.isend(token, dst=r) for r in range(1, size)] if rank == 0 else [dist.irecv(token, src=0)]
    # both return at once, and the rank is free to compute; but until wait() it must not change the sent or read the received tensor
    for request in requests:
        request.wait()
    check(token.item() == 7, f"isend, irecv: {size} ranks, the first sends to all others at once")


def groups(rank: int, size: int) -> None:
    """Makes a group of the even ranks and one of the odd. Every rank calls new_group for each, also for those that it is not in."""
    both = [dist.new_group(list(range(first, size, 2))) for first in (0, 1)]
    dist.all_reduce(total := tensor([rank]), group=both[rank % 2])
    check(total.item() == sum(range(rank % 2, size, 2)), f"new_group: even and odd of {size} ranks have separate sums")


def collectives(rank: int, size: int) -> None:
    """Calls operations in which every rank of a group takes part, all in the same order. Rank r has the value 10 r + i for rank i."""
    everyone, last = range(size), size - 1  # any rank could be the one that sends to all, or receives from all
    got, mine, table = tensor([rank]), [tensor([10 * rank + i]) for i in everyone], torch.full([size], -1)
    rows = list(table.split(1))  # views: what a rank receives in a row is in the table
    dist.broadcast(got, src=last)
    check(got.item() == last, f"broadcast: {size} ranks have the last one's tensor")
    dist.scatter(got, mine if rank == last else None, src=last)
    check(got.item() == 10 * last + rank, f"scatter: {size} ranks have one each of the last one's tensors")
    dist.gather(mine[0], rows if rank == last else None, dst=last)
    check(rank != last or table.tolist() == [10 * r for r in everyone], f"gather: the last of {size} ranks has all")
    dist.reduce(got.fill_(rank), dst=last)  # what the other ranks have afterwards is undefined
    check(rank != last or got.item() == sum(everyone), f"reduce: the last of {size} ranks has the sum")
    for operation, python in (("SUM", sum), ("PRODUCT", math.prod), ("MIN", min), ("MAX", max)):
        dist.all_reduce(got.fill_(rank + 1), getattr(dist.ReduceOp, operation))
        check(got.item() == python(r + 1 for r in everyone), f"all_reduce: {size} ranks have the {operation}")
    dist.all_gather(rows, mine[-1])
    check(table.tolist() == [10 * r + last for r in everyone], f"all_gather: {size} ranks have one tensor of each")
    dist.reduce_scatter(got, mine)
    check(got.item() == sum(10 * r + rank for r in everyone), f"reduce_scatter: {size} ranks have one sum each")
    dist.all_to_all(rows, mine)
    check(table.tolist() == [10 * r + rank for r in everyone], f"all_to_all: {size} ranks swap their tensors")


def ring_all_reduce(values: Tensor) -> None:
    """Sums `values` over the n ranks in place. Each rank sends 2 (n - 1) / n of it in all, and only to the next rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    chunks = values.tensor_split(size)  # views: a change of a chunk changes `values`
    for step in range(2 * (size - 1)):
        # what arrives in one step leaves in the next
        leaving, ours = chunks[(rank - step) % size], chunks[(rank - step - 1) % size]
        arriving = torch.empty_like(ours)
        # both at once: if all ranks first sent and then received, each might wait forever for its receiver
        send = dist.P2POp(dist.isend, leaving, (rank + 1) % size)
        for request in dist.batch_isend_irecv([send, dist.P2POp(dist.irecv, arriving, (rank - 1) % size)]):
            request.wait()
        # first half, reduce-scatter: partial sums go round, until each rank has one chunk's sum; second half, all-gather: sums go round
        ours.copy_(ours + arriving if step < size - 1 else arriving)


def ring(rank: int, size: int) -> None:
    """Compares the ring with all_reduce, bit for bit: whole numbers have the same sum in any order of additions, other floats may not."""
    ours = torch.arange(1001.0) * (rank + 1)  # in chunks of different lengths
    dist.all_reduce(theirs := ours.clone())
    ring_all_reduce(ours)
    check(torch.equal(ours, theirs), f"ring all-reduce: {size} ranks, equals all_reduce")


def partition(samples: int, rank: int, size: int, seed: int) -> list[int]:
    """Returns the indices of a rank's samples. All ranks draw the same order from the seed, so none has to ask another."""
    # equal parts, for which the last few samples are left out: a rank with one batch more would wait for the others in vain
    order = random.Random(seed).sample(range(samples), samples - samples % size)
    return order[rank::size]


def sgd(model: nn.Module, inputs: Tensor, targets: Tensor, rank: int, size: int, batch: int) -> float:
    """Trains on one of `size` parts of the data; returns the last loss."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.5)
    for epoch in range(3):
        part = partition(len(inputs), rank, size, seed=epoch)
        for chosen in (part[at : at + batch] for at in range(0, len(part), batch)):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs[chosen]), targets[chosen])
            loss.backward()
            for p in model.parameters() if size > 1 else ():
                dist.all_reduce(p.grad)
                p.grad /= size  # as parts are equal, the mean of their gradients is the gradient of the whole batch
            optimizer.step()
    return loss.item()


def training(rank: int, size: int) -> None:
    """Trains with all ranks, and alone on whole batches: the same weights, up to the order of additions."""
    dealt = sorted(sample for r in range(size) for sample in partition(10 * size, r, size, seed=0))
    check(dealt == list(range(10 * size)), f"partition: {size} ranks, each sample in one part")

    torch.manual_seed(0)  # all ranks begin with the same weights; DistributedDataParallel broadcasts those of rank 0
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    inputs = torch.randn(32 * size, 8, dtype=torch.float64)
    targets, alone = inputs.sum(dim=1, keepdim=True), copy.deepcopy(model)
    sgd(model, inputs, targets, rank, size, batch=4)
    loss = sgd(alone, inputs, targets, rank=0, size=1, batch=4 * size)
    torch.testing.assert_close(model.state_dict(), alone.state_dict(), rtol=1e-9, atol=1e-12)
    check(loss < 0.5 * targets.var(), f"training: {size} ranks, the weights of one process on the whole batch")


def work(rank: int, size: int, port: int, folder: str, parts: tuple) -> None:
    """Runs one rank, in a process of its own."""
    torch.set_num_threads(1)  # the ranks share the cores
    backend = "nccl" if torch.cuda.device_count() >= size else "gloo"  # MPI, a third one, needs a torch built with it
    if backend == "nccl":  # one GPU per rank
        torch.cuda.set_device(rank)
        torch.set_default_device(f"cuda:{rank}")
    init_methods(rank, size, backend, dist.TCPStore(HOST, port, is_master=False), folder)
    for part in parts:
        part(rank, size)
    dist.destroy_process_group()


def main(size: int, parts: tuple = (point_to_point, groups, collectives, ring, training)) -> None:
    """Starts the ranks and waits for them. If one fails, ends the others and raises its error."""
    store = serve()  # of this process, which outlives all ranks
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, (size, store.port, folder, parts), nprocs=size)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=4, choices=range(2, 17), metavar="2..16")
    main(parser.parse_args().ranks)

"""Replica groups and their lighthouse as TorchX components, for whatever scheduler TorchX knows.

    torchx run --scheduler local_cwd contrib/torchx_component.py:lighthouse --min_replicas 1 --token_file token
    torchx run --scheduler local_cwd contrib/torchx_component.py:groups --config configs/llama.toml --lighthouse http://HOST:29510 \
        --token_file token --groups 2

Two, as one of them ends and the other does not: an app is over when all its roles are. The token is a file that both see; its content is
on no command line. torchx itself (`pip install torchx`) is needed by whoever runs `torchx`, and by no rank.
"""

from torchx import specs

# No `from __future__ import annotations`: TorchX reads the annotations as types, for its command line.


def lighthouse(
    min_replicas: int,
    token_file: str,
    image: str = "pharos:latest",
    root: str = ".",
    bind: str = "[::]:29510",
    state_file: str = "",
    max_retries: int = 100,
) -> specs.AppDef:
    """The server that tells replica groups who takes part; it runs until it is cancelled.

    Args:
        min_replicas: the fewest groups that train
        token_file: the job's secret, in the container
        image: a container with the repository, and a Python with requirements-lighthouse.lock
        root: where in it the repository is
        bind: host and port that the groups reach it by
        state_file: what a restart must know, on a disk that outlives the container; default outputs/lighthouse-PORT.json
        max_retries: how often it is started again
    """
    state = ["--state_file", state_file] if state_file else []
    role = specs.Role(
        name="lighthouse",
        image=image,
        entrypoint=f"{root}/scripts/run_lighthouse.sh",
        args=["--min_replicas", str(min_replicas), "--bind", bind, "--token_file", token_file, *state],
        env={"PHAROS_NO_INSTALL": "1"},
        max_retries=max_retries,
        retry_policy=specs.RetryPolicy.REPLICA,
        port_map={"grpc": int(bind.rpartition(":")[2])},
    )
    return specs.AppDef(name="pharos-lighthouse", roles=[role])


def groups(
    config: str,
    lighthouse: str,
    token_file: str,
    *arguments: str,
    groups: int = 2,
    image: str = "pharos:latest",
    root: str = ".",
    cpu: int = 1,
    gpu: int = 0,
    memMB: int = 4096,  # noqa: N803 (TorchX's own name)
    max_retries: int = 100,
) -> specs.AppDef:
    """Replica groups, each a replica of one role, which the scheduler starts again alone.

    Args:
        config: the TOML file
        lighthouse: its address, http://HOST:PORT
        token_file: the job's secret, in the container
        arguments: overrides, such as --training.steps=200
        groups: how many
        image: a container with the repository, and a Python with requirements.lock
        root: where in it the repository is
        cpu: cores of a group
        gpu: GPUs of a group; a rank for each
        memMB: memory of a group, in MB
        max_retries: how often a group is started again
    """
    role = specs.Role(
        name="group",
        image=image,
        entrypoint=f"{root}/scripts/run_group.sh",
        args=[config, "--fault_tolerance.enable=true", *arguments],
        env={
            "PHAROS_NO_INSTALL": "1",
            "PHAROS_TOKEN_FILE": token_file,
            "TORCHFT_LIGHTHOUSE": lighthouse,
            "NUM_REPLICA_GROUPS": str(groups),
            "REPLICA_GROUP_ID": specs.macros.replica_id,
        },
        num_replicas=groups,
        max_retries=max_retries,
        retry_policy=specs.RetryPolicy.REPLICA,
        resource=specs.Resource(cpu=cpu, gpu=gpu, memMB=memMB),
    )
    return specs.AppDef(name="pharos", roles=[role])

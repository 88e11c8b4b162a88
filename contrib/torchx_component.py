"""TorchX components for replica groups and for their lighthouse, for any scheduler that TorchX supports.

    torchx run --scheduler local_cwd contrib/torchx_component.py:lighthouse --min_replicas 1 --token_file token
    torchx run --scheduler local_cwd contrib/torchx_component.py:groups --config configs/llama.toml --lighthouse http://HOST:29510 \
        --token_file token --groups 2

They are two apps because an app ends when all its roles end, and the lighthouse does not. The token is in a file that both can read, never
on a command line. Only the `torchx` command requires torchx (`pip install torchx`), not the ranks.
"""

from torchx import specs

# No `from __future__ import annotations`: TorchX reads the annotations as types, for its command line.


def lighthouse(
    min_replicas: int,
    token_file: str,
    image: str = "pharos:latest",
    root: str = ".",
    bind: str = "",
    state_file: str = "",
    max_retries: int = 100,
) -> specs.AppDef:
    """The job's lighthouse, which forms quorums of replica groups; it runs until it is cancelled.

    Args:
        min_replicas: minimum number of groups in a quorum
        token_file: path of the job's token in the container
        image: container with the repository, and a Python with requirements-lighthouse.lock
        root: path of the repository in the container
        bind: host and port on which it listens for the groups; default port 29510 of all interfaces
        state_file: its state for a restart, on a disk that outlives the container; default outputs/lighthouse-PORT.json
        max_retries: maximum number of restarts
    """
    given = [*(["--bind", bind] if bind else []), *(["--state_file", state_file] if state_file else [])]
    role = specs.Role(
        name="lighthouse",
        image=image,
        entrypoint=f"{root}/scripts/run_lighthouse.sh",
        args=["--min_replicas", str(min_replicas), "--token_file", token_file, *given],
        env={"PHAROS_NO_INSTALL": "1"},
        max_retries=max_retries,
        retry_policy=specs.RetryPolicy.REPLICA,
        port_map={"grpc": int(bind.rpartition(":")[2] or 29510)},
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
    """Replica groups, each a replica of one role, which the scheduler restarts separately.

    Args:
        config: the TOML file
        lighthouse: address of the lighthouse, http://HOST:PORT
        token_file: path of the job's token in the container
        arguments: overrides, such as --training.steps=200
        groups: number of replica groups
        image: container with the repository, and a Python with requirements.lock
        root: path of the repository in the container
        cpu: cores per group
        gpu: GPUs per group, one rank each
        memMB: memory per group, in MB
        max_retries: maximum number of restarts of a group
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

"""The stacks of many processes in groups."""

from __future__ import annotations

from rdzv.core.stuck.beats import BeatNote
from rdzv.core.stuck.judging import Heard
from rdzv.display.stacks import ProcessStack, describe_groups, processes_in

ANSWER = """rank {rank}, process 4{rank} (python train.py):
Thread 0x00007f{rank}01 (most recent call first):
  File "/lib/threading.py", line {line} in wait

Current thread 0x00007f{rank}00 (most recent call first):
  File "/job/dist.py", line {line} in {function}
  File "/job/train.py", line 9 in main
"""


def answer(rank: int, function: str, line: int = 120) -> str:
    return ANSWER.format(rank=rank, function=function, line=line)


def test_a_process_is_its_main_thread() -> None:
    first, second = processes_in("a", answer(0, "all_reduce") + answer(1, "read_batch", 17))
    assert (first.rank, first.frames) == ("0", ("all_reduce (/job/dist.py:120)", "main (/job/train.py:9)"))
    assert second.frames[0] == "read_batch (/job/dist.py:17)"


def test_who_does_not_answer_or_has_none_is_kept_with_what_is_said() -> None:
    (stopped,) = processes_in("a", "rank 3, process 5 (python) does not answer: its state is T (stopped)\n")
    assert (stopped.rank, stopped.frames, stopped.note) == ("3", (), "does not answer: its state is T (stopped)")
    (refused,) = processes_in("a", "refused: this launcher runs with --no-remote-stacks")
    assert refused.note == "refused: this launcher runs with --no-remote-stacks"


def test_the_odd_ones_come_first_with_their_nodes_and_steps() -> None:
    heard = {
        f"gpu-{number:03}": Heard(note=BeatNote(round=0, step=1203 if number == 17 else 1204, age=240.0), ago=0.0)
        for number in range(63)
    }
    stacks = [
        one
        for number in range(63)
        for one in processes_in(f"gpu-{number:03}", answer(number, "read_batch" if number == 17 else "all_reduce"))
    ]
    assert describe_groups(stacks, heard, silent={"gpu-099"}) == [
        "1 in read_batch (step 1,203): gpu-017",
        "    step 1,203 since 4 min",
        "    read_batch (/job/dist.py:120)",
        "    main (/job/train.py:9)",
        f"62 in all_reduce (step 1,204): {', '.join(f'gpu-00{number}' for number in range(8))} and 54 more",
        "    all_reduce (/job/dist.py:120)",
        "    main (/job/train.py:9)",
        "no answer: gpu-099",
    ]


def test_a_deep_stack_is_cut() -> None:
    deep = ProcessStack(node_id="a", rank="0", frames=tuple(f"f{depth} (x.py:1)" for depth in range(20)))
    assert describe_groups([deep], {}, silent=())[-1] == "    and 8 more frames"

"""The scheduler's benchmark builds the trees it says, measures what it says, and explains itself."""

import pytest

from tools import bench_scheduler


@pytest.mark.parametrize(("shape", "path"), [("turns", 2), ("chunks", 4), ("blocks", 128)])
def test_the_trees_have_the_shape_they_are_named_after(shape: str, path: int) -> None:
    """2,048-token prompts, the first 512 of which are shared: 128 blocks, in nodes of one part, 512 tokens, 1 block."""
    tree, cached, _ = bench_scheduler.build_tree(shape, 300, 16, 2048)
    assert tree.num_blocks >= 300
    depths = []
    for prompt in cached:
        match = tree.match(prompt)
        assert len(match.blocks) == 128
        node, depth = match.node, 0
        while node is not None and node.parent is not None:
            node, depth = node.parent, depth + 1
        depths.append(depth)
    assert set(depths) == {path}


def test_every_part_prints_a_row_for_each_case(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--blocks", "200", "--context", "256", "--repeats", "5", "--steps", "20", "--running", "1,3"]
    assert bench_scheduler.main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    tree = next(index for index, line in enumerate(lines) if line.startswith("prefix of 256 tokens"))
    assert [line.split()[0] for line in lines[tree + 1 : tree + 5]] == ["tree", "turns", "chunks", "blocks"]
    step = next(index for index, line in enumerate(lines) if line.startswith("decode step"))
    assert [line.split()[0] for line in lines[step + 1 :]] == ["running", "1", "3"]
    for line in lines[tree + 2 : tree + 5] + lines[step + 2 :]:
        assert all(float(cell) >= 0 for cell in line.split()[1:])


@pytest.mark.parametrize(("name", "value"), [("--context", "10"), ("--running", "0"), ("--steps", "0")])
def test_impossible_numbers_are_refused_by_name(name: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        bench_scheduler.main([name, value])
    assert stopped.value.code == 2
    assert name in capsys.readouterr().err.splitlines()[-1]

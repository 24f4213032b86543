"""When the ranks of a replica count as ready, over losses and returns in any order."""

from scheduler_proc.ranks import Ranks


def test_all_ranks_make_it_ready_and_one_loss_unready() -> None:
    ranks = Ranks(3)
    assert [ranks.reported(rank, 7) for rank in ranks.names] == [False, False, True]
    assert ranks.ready
    assert ranks.lost(b"rank1")
    assert not ranks.ready
    assert not ranks.lost(b"rank0")
    assert not ranks.lost(b"rank2")


def test_successors_report_before_the_other_losses_are_noticed() -> None:
    ranks = Ranks(2)
    for rank in ranks.names:
        ranks.reported(rank, 7)
    assert ranks.lost(b"rank0")
    assert not ranks.reported(b"rank0", 8)
    assert not ranks.lost(b"rank1")  # the old one
    assert ranks.reported(b"rank1", 8)


def test_a_straggler_of_an_older_generation_does_not_make_it_ready() -> None:
    ranks = Ranks(2)
    assert not ranks.reported(b"rank0", 8)
    # rank 1 of that generation died while it loaded; rank 0 was killed then, but its loss has not been noticed yet.
    assert not ranks.reported(b"rank1", 9)
    assert not ranks.ready
    assert not ranks.lost(b"rank0")
    assert ranks.reported(b"rank0", 9)


def test_a_rank_of_whom_nothing_was_known_may_be_lost() -> None:
    ranks = Ranks(1)
    assert not ranks.lost(b"rank0")
    assert ranks.reported(b"rank0", 1)
    assert not ranks.reported(b"rank0", 1)

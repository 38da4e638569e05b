"""One loop over a run's rounds, for training code: `rdzv.rounds` and its blocking twin.

The names imported here are for `rdzv run` and `rdzv.torch`, which drive rounds themselves.
"""

from rdzv.core.keys import Keys as Keys
from rdzv.core.questions import KILL as KILL
from rdzv.core.questions import STACKS as STACKS
from rdzv.core.round_life import EndKind as EndKind
from rdzv.core.round_life import MemberPhase as MemberPhase
from rdzv.core.round_life import NextAfterWork as NextAfterWork
from rdzv.core.state import MOVES as MOVES
from rdzv.core.state import leaving_in_words as leaving_in_words
from rdzv.core.stuck.tally import RunCounts as RunCounts
from rdzv.errors import STATUS_MAX as STATUS_MAX
from rdzv.errors import mark_run as mark_run
from rdzv.shared_store.arguments import iterable_as_tuple as iterable_as_tuple
from rdzv.shared_store.store import BlockingSharedStore as BlockingSharedStore
from store.limits import is_loopback as is_loopback
from store.net.tasks import cancel_and_wait as cancel_and_wait
from store.net.threads import Call as Call
from store.net.threads import in_thread as in_thread

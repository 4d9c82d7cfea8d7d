"""distkv: an exact prefix cache for the paged KV memory of LLM engines on several ranks.

Every rank takes the same decision, by construction: matched length, admission and failure are agreed in one
collective per step. Start with :class:`PrefixCache`; ``README.md`` has an example that runs.
"""

from distkv.cache import PrefixCache
from distkv.chain import KeyChain
from distkv.config import (
    CacheConfig,
    Config,
    GroupConfig,
    HostConfig,
    LabelConfig,
    PoolConfig,
    agreed_fields,
    from_mapping,
    load,
)
from distkv.encoding import content_digest
from distkv.errors import (
    ConfigError,
    CopyFailed,
    DistKVError,
    DuplicateRequest,
    GroupDivergence,
    GroupError,
    GroupMismatch,
    GroupTimeout,
    HostMemoryError,
    InvariantError,
    KeyNamingError,
    LayoutMismatch,
    MessageError,
    NoRoom,
    PeerFailed,
    PeerFault,
    PeerLost,
    RequestError,
    RequestTooLarge,
    SequenceError,
    TableError,
)
from distkv.faults import Fault
from distkv.forks import Branch
from distkv.group import Group, LocalGroup, SoloGroup, Ticket
from distkv.host.copies import Copy, CopyEngine
from distkv.host.kv import KVLayout, PagedKV
from distkv.keys import Adapter, Fingerprint, Span
from distkv.mpi_group import MpiGroup
from distkv.pagelist import PageList
from distkv.reasons import Reason
from distkv.request import Forked, Message, Refused, Request, RequestRecord, ResetResult, StepResult, Waiting
from distkv.sequence import Sequence
from distkv.stats import LabelStats, Stats
from distkv.table_buffers import TableBuffers, TableRing
from distkv.tables import Tables
from distkv.torch_group import TorchGroup

__version__ = "0.1.0"

__all__ = [
    "Adapter",
    "Branch",
    "CacheConfig",
    "Config",
    "ConfigError",
    "Copy",
    "CopyEngine",
    "CopyFailed",
    "DistKVError",
    "DuplicateRequest",
    "Fault",
    "Fingerprint",
    "Forked",
    "Group",
    "GroupConfig",
    "GroupDivergence",
    "GroupError",
    "GroupMismatch",
    "GroupTimeout",
    "HostConfig",
    "HostMemoryError",
    "InvariantError",
    "KVLayout",
    "KeyChain",
    "KeyNamingError",
    "LabelConfig",
    "LabelStats",
    "LayoutMismatch",
    "LocalGroup",
    "Message",
    "MessageError",
    "MpiGroup",
    "NoRoom",
    "PageList",
    "PagedKV",
    "PeerFailed",
    "PeerFault",
    "PeerLost",
    "PoolConfig",
    "PrefixCache",
    "Reason",
    "Refused",
    "Request",
    "RequestError",
    "RequestRecord",
    "RequestTooLarge",
    "ResetResult",
    "Sequence",
    "SequenceError",
    "SoloGroup",
    "Span",
    "Stats",
    "StepResult",
    "TableBuffers",
    "TableError",
    "TableRing",
    "Tables",
    "Ticket",
    "TorchGroup",
    "Waiting",
    "agreed_fields",
    "content_digest",
    "from_mapping",
    "load",
]

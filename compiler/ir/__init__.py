"""The IR: one interned node class for values, storage and statements.

Values are a DAG (identity is equality). Statements are a tree per role whose order is program
order. A kernel is a set of concurrent roles that meet only at barriers.
"""

from ptxflow.compiler.ir.nodes import *  # noqa: F403
from ptxflow.compiler.ir.statements import *  # noqa: F403
from ptxflow.compiler.ir.storage import *  # noqa: F403

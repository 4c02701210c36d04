"""The error tree of the product, and the exit code each branch ends the command with.

StrataError
  ConfigError            usage or configuration                              exit 2
  PlanError              nothing fits, or a preflight failed                 exit 3
    BindingError         the device or the NUMA node named is not there
  AlreadyRunningError    another launch holds the lock                       exit 5
  ModelError             the model file is damaged or not supported          exit 6
  RequestError           one request fails: too long, cancelled, not finite  exit 1
  StageError             a stage failed; stage and phase are named           exit 1
    StageLostError       the process ended
    StageFailedError     the stage reported an exception
    StageTimeoutError    an awaited step did not happen in time
  ProtocolError          bad tag, version, size or order: ends the link      exit 7
  InvariantError         an internal invariant is broken                     exit 7

Messages are one line that a user can act on: they name file, key or stage and both numbers, and never a
handle, a socket path or an address.
"""


class StrataError(Exception):
    """Base of every error the product raises on purpose."""

    exit_code = 1


class ConfigError(StrataError):
    """Usage or configuration is wrong; the message names file, key and line."""

    exit_code = 2


class PlanError(StrataError):
    """Nothing fits: names stage, item, need, have and the setting that moves it."""

    exit_code = 3


class BindingError(PlanError):
    """The device or the NUMA node named in the configuration is not there."""


class AlreadyRunningError(StrataError):
    """Another launch holds the lock."""

    exit_code = 5


class ModelError(StrataError):
    """The model file is damaged, hostile or of a kind that this program does not run."""

    exit_code = 6


class RequestError(StrataError):
    """One request fails; the launch goes on."""


class StageError(StrataError):
    """A stage failed."""


class StageLostError(StageError):
    """The process of a stage ended: exit status or signal, and the last lines of its stderr."""


class StageFailedError(StageError):
    """A stage reported an exception: class name, text and traceback travel as strings."""


class StageTimeoutError(StageError):
    """An awaited step did not happen in time: what was awaited, and for how long."""


class ProtocolError(StrataError):
    """A message has a bad tag, version, size or order. It ends the link, never the interpreter."""

    exit_code = 7


class InvariantError(StrataError):
    """An internal invariant is broken. Raised explicitly, since python -O removes asserts."""

    exit_code = 7

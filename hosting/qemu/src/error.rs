//! Errors of starting and running machines: few kinds, and messages that say what to do.

use std::path::{Path, PathBuf};
use std::time::Duration;

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A program or file that a machine needs is not on this host.
    #[error("cannot start machines: {what} is not installed; install it ({packages})")]
    NotInstalled {
        /// The program or file that is missing.
        what: String,
        /// The packages that have it.
        packages: &'static str,
    },
    /// This host does not have the network that a machine is to be connected to, or this process may not connect it.
    #[error("cannot connect a machine to bridge '{bridge}': {reason}")]
    Bridge {
        /// Name of the bridge.
        bridge: String,
        /// The problem, and how to solve it.
        reason: String,
    },
    /// The description of the guest cannot be met. Nothing was started.
    #[error("machine '{machine}' cannot run here: {reason}")]
    Spec {
        /// Name of the machine.
        machine: String,
        /// The wrong value, and the permitted values.
        reason: String,
    },
    /// QEMU ended before it was ready.
    #[error("QEMU for machine '{machine}' ended at its start ({status}): {stderr}")]
    StartFailed {
        /// Name of the machine.
        machine: String,
        /// Exit status, as text.
        status: String,
        /// The last lines that QEMU printed.
        stderr: String,
    },
    /// The TPM ended before it was ready.
    #[error("the TPM (swtpm) of machine '{machine}' ended before it was ready ({status}): {output}")]
    TpmFailed {
        /// Name of the machine.
        machine: String,
        /// Exit status, as text.
        status: String,
        /// The last lines that swtpm printed.
        output: String,
    },
    /// A file or socket could not be used.
    #[error("cannot {what} {path}: {source}")]
    Io {
        /// Verb and object, for instance "create the seed disk".
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// QEMU's monitor refused a command.
    #[error("QEMU refused '{command}': {description} ({class})")]
    Monitor {
        /// The QMP command.
        command: String,
        /// QEMU's class of the error.
        class: String,
        /// QEMU's description.
        description: String,
    },
    /// The guest agent refused a command, for instance because the program to run does not exist.
    #[error("the guest agent refused '{command}': {description}")]
    Agent {
        /// The agent's command.
        command: String,
        /// The agent's description.
        description: String,
    },
    /// The other side sent something that is not its protocol.
    #[error("{peer} sent something unexpected: {detail}")]
    Protocol {
        /// The sender: the monitor or the agent.
        peer: &'static str,
        /// The unexpected message or field.
        detail: String,
    },
    /// No answer in time.
    #[error("{what}: no answer within {} s", .after.as_secs_f64())]
    Timeout {
        /// The operation that was not answered.
        what: String,
        /// How long the caller waited.
        after: Duration,
    },
    /// No agent in the guest answers: none is installed, or the guest does not let it run.
    #[error("the guest agent does not answer within {} s", .after.as_secs_f64())]
    NoAgent {
        /// How long the caller waited.
        after: Duration,
    },
    /// QEMU is not running any more.
    #[error("the machine is not running: {0}")]
    Gone(String),
}

impl Error {
    /// For `map_err` on an I/O result that concerns `path`.
    pub(crate) fn io(what: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> Self + use<> {
        let path = path.to_path_buf();
        move |source| Self::Io { what, path, source }
    }
}

/// Shorthand for this crate's results.
pub type Result<T> = std::result::Result<T, Error>;

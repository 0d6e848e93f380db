//! The trait [`Hypervisor`], through which the service runs virtual machines.

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use headwater_api::platform::Platform;
use headwater_api::{DiskTransport, Identity};
use headwater_db::Secret;
use uuid::Uuid;

use crate::backend::BackendError;

/// The settings of a machine that are known before it is created.
#[derive(Clone, Copy, Debug)]
pub struct VmPlan<'a> {
    /// Its name.
    pub name: &'a str,
    /// The guest's memory.
    pub memory_bytes: u64,
    /// The guest's processors.
    pub cpus: u32,
    /// Firmware, TPM, display, network and scratch disk.
    pub platform: &'a Platform,
    /// The guest's host name.
    pub host_name: &'a str,
    /// Its cloud-init user data.
    pub user_data: Option<&'a str>,
}

/// A virtual machine to start.
#[derive(Clone, Debug)]
pub struct VmRequest {
    /// The machine's name.
    pub name: String,
    /// Its UUID.
    pub uuid: Uuid,
    /// Its network address.
    pub mac: String,
    /// Its directory, for sockets, console log and seed disk.
    pub run_dir: PathBuf,
    /// The guest's memory.
    pub memory_bytes: u64,
    /// The guest's processors.
    pub cpus: u32,
    /// Firmware, TPM, display, network and scratch disk.
    pub platform: Platform,
    /// The file that stores the firmware's variables for the next start. Absent: they start empty, and are removed with its
    /// sockets.
    pub kept_variables: Option<PathBuf>,
    /// The directory that stores the state of its TPM for the next start. Absent: it gets a new TPM, which is removed with
    /// its sockets.
    pub kept_tpm: Option<PathBuf>,
    /// The socket that serves its disk.
    pub disk_socket: PathBuf,
    /// The protocol of that socket.
    pub transport: DiskTransport,
    /// Size of the disk's sectors.
    pub sector_bytes: u32,
    /// The identity that the guest gets on the seed disk.
    pub identity: Identity,
    /// The private half of its SSH host key.
    pub ssh_host_key_private: Secret,
}

/// A virtual machine that may still run although the daemon that started it has ended.
#[derive(Clone, Debug)]
pub struct LeftVm {
    /// The machine's name.
    pub name: String,
    /// Its directory, which has its sockets and the file with its process number.
    pub run_dir: PathBuf,
    /// The guest's processors.
    pub cpus: u32,
    /// How long its boot took, if it has booted.
    pub boot_ms: Option<u64>,
}

/// How a virtual machine ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum VmExit {
    /// The guest switched itself off, or was asked to.
    PoweredOff,
    /// The guest restarted itself. Its next boot gets a pristine disk.
    Rebooted,
    /// Its process was ended, on request or because the guest did not shut down in time.
    Killed,
    /// The process ended with an error or by a signal.
    Crashed {
        /// Exit status and last output.
        reason: String,
    },
}

/// The result of a command in a guest.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ExecOutput {
    /// Its exit code, or 128 + the signal that ended it.
    pub exit_code: i32,
    /// Its standard output.
    pub stdout: Vec<u8>,
    /// Its standard error.
    pub stderr: Vec<u8>,
    /// Whether the output was cut off.
    pub truncated: bool,
}

/// Starts virtual machines.
#[async_trait]
pub trait Hypervisor: Send + Sync + 'static {
    /// How machines run on this host (`KVM`, `TCG: reason`), or why they cannot.
    async fn describe(&self) -> Result<String, BackendError>;

    /// Fails if this host cannot run such a machine, or if the user data is not valid.
    async fn check(&self, plan: VmPlan<'_>) -> Result<(), BackendError>;

    /// Starts a machine. Returns when its process answers.
    async fn start(&self, request: VmRequest) -> Result<Arc<dyn Vm>, BackendError>;

    /// Takes over a virtual machine that an earlier daemon left running. `None` if it has ended or cannot be controlled;
    /// [`Hypervisor::sweep_orphans`] then ends its remaining processes.
    async fn adopt(&self, left: LeftVm) -> Result<Option<Arc<dyn Vm>>, BackendError> {
        let _ = left;
        Ok(None)
    }

    /// Ends the processes that an earlier daemon left, except those of the machines `adopted`. Verifies first that each
    /// process is what it seems to be. Returns the names of their machines. Must be called once, before the first
    /// start.
    async fn sweep_orphans(&self, run_root: &Path, adopted: &[String]) -> Result<Vec<String>, BackendError>;

    /// The path of a machine's console log in its directory.
    fn console_log(&self, run_dir: &Path) -> PathBuf;

    /// The path of the console's socket in a machine's directory; it exists while the machine is on.
    fn console_socket(&self, run_dir: &Path) -> PathBuf;

    /// The path of the display's socket in a machine's directory; it exists while the machine is on.
    fn display_socket(&self, run_dir: &Path) -> PathBuf;
}

/// A virtual machine that was started.
#[async_trait]
pub trait Vm: Send + Sync + 'static {
    /// Its process id.
    fn pid(&self) -> u32;

    /// The accelerator: `kvm` or `tcg`.
    fn accelerator(&self) -> String;

    /// Whether it is paused because its disk has no space. It resumes by itself when there is space.
    fn is_out_of_space(&self) -> bool;

    /// Waits until the guest reports that it has booted. Never returns if it does not.
    async fn booted(&self);

    /// Waits until the firmware reports that it finds nothing to boot, and returns its message. Never returns if it does
    /// not.
    async fn found_nothing_to_boot(&self) -> String {
        std::future::pending().await
    }

    /// Waits for the end of its process. Several callers may wait; after the end it returns at once.
    async fn exited(&self) -> VmExit;

    /// Asks the guest to shut down (ACPI) and waits for that; ends the process if the guest has not shut down within
    /// `grace`.
    async fn stop(&self, grace: Duration) -> Result<VmExit, BackendError>;

    /// Ends the process at once. A concurrent [`Vm::stop`] then returns.
    async fn kill(&self) -> Result<(), BackendError>;

    /// Asks the guest agent to sync file systems while the guest keeps running, and waits briefly for a moment in which the
    /// guest has an idle processor. Fails soon if no agent answers.
    async fn write_file_systems_out(&self) -> Result<(), BackendError>;

    /// Asks the guest agent to sync and freeze all file systems: the guest writes nothing until it thaws them.
    async fn freeze_file_systems(&self) -> Result<(), BackendError>;

    /// Thaws the file systems.
    async fn thaw_file_systems(&self) -> Result<(), BackendError>;

    /// Asks the guest agent to remove the machine's identity and the files `also` (paths with wildcards). Returns what was
    /// removed. The guest keeps running without an identity, and must be switched off. An error of kind `Conflict` means
    /// that the guest has a tool of its own for this, which the user must run.
    async fn generalise(&self, host_name: &str, also: &[String]) -> Result<Vec<String>, BackendError>;

    /// A screenshot of its display, as a PNG.
    async fn screenshot(&self) -> Result<Vec<u8>, BackendError>;

    /// The guest's addresses, as its agent reports them.
    async fn addresses(&self) -> Result<Vec<IpAddr>, BackendError>;

    /// The number of users who are logged in, as the guest agent reports.
    async fn users(&self) -> Result<usize, BackendError>;

    /// Runs a command in the guest through its agent. `input` is its standard input.
    async fn exec(
        &self,
        argv: &[String],
        input: Vec<u8>,
        timeout: Duration,
    ) -> Result<ExecOutput, BackendError>;
}

//! Running machines, as the service needs it.

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

/// What is known of a machine before it is made.
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
    /// What is to be done in the guest.
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
    /// Its directory: sockets, console log and seed disk go there.
    pub run_dir: PathBuf,
    /// The guest's memory.
    pub memory_bytes: u64,
    /// The guest's processors.
    pub cpus: u32,
    /// Firmware, TPM, display, network and scratch disk.
    pub platform: Platform,
    /// The file that keeps the variables of its firmware for its next start. Absent: it gets new ones, which go with its sockets.
    pub kept_variables: Option<PathBuf>,
    /// The directory that keeps the state of its TPM for its next start. Absent: it gets a new TPM, which goes with its sockets.
    pub kept_tpm: Option<PathBuf>,
    /// Where its disk is served.
    pub disk_socket: PathBuf,
    /// What is spoken there.
    pub transport: DiskTransport,
    /// Size of the disk's sectors.
    pub sector_bytes: u32,
    /// What the guest is told about itself.
    pub identity: Identity,
    /// The private half of its SSH host key.
    pub ssh_host_key_private: Secret,
}

/// A virtual machine that may still run although the program that started it has ended.
#[derive(Clone, Debug)]
pub struct LeftVm {
    /// The machine's name.
    pub name: String,
    /// Its directory, which has its sockets and the file with its process number.
    pub run_dir: PathBuf,
    /// The guest's processors.
    pub cpus: u32,
    /// How long its boot took, if it is known to be up.
    pub boot_ms: Option<u64>,
}

/// How a virtual machine ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum VmExit {
    /// The guest switched itself off, or was asked to.
    PoweredOff,
    /// The guest restarted itself; its next boot is to be given a pristine disk.
    Rebooted,
    /// It was ended: on request, or because the guest did not switch itself off in time.
    Killed,
    /// The process ended with an error or by a signal.
    Crashed {
        /// Exit status and last words.
        reason: String,
    },
}

/// What a command in a guest gave.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ExecOutput {
    /// Its exit code, or 128 + the signal that ended it.
    pub exit_code: i32,
    /// Its standard output.
    pub stdout: Vec<u8>,
    /// Its standard error.
    pub stderr: Vec<u8>,
    /// Whether output was cut off.
    pub truncated: bool,
}

/// Starts virtual machines.
#[async_trait]
pub trait Hypervisor: Send + Sync + 'static {
    /// How machines run on this host (`KVM`, `TCG: reason`), or why they cannot.
    async fn describe(&self) -> Result<String, BackendError>;

    /// Whether this host can run such a machine, and a guest understand what it is told.
    async fn check(&self, plan: VmPlan<'_>) -> Result<(), BackendError>;

    /// Starts one. Returns when its process runs and answers.
    async fn start(&self, request: VmRequest) -> Result<Arc<dyn Vm>, BackendError>;

    /// Takes over a virtual machine that an earlier program started and left running. `None` if it has ended, or cannot be controlled:
    /// then [`Hypervisor::sweep_orphans`] ends what is left of it.
    async fn adopt(&self, left: LeftVm) -> Result<Option<Arc<dyn Vm>>, BackendError> {
        let _ = left;
        Ok(None)
    }

    /// Ends the processes that an earlier daemon left, after making sure that they are what they seem, except those of the machines
    /// `adopted`. Returns the names of the machines concerned. Called once, before the first start.
    async fn sweep_orphans(&self, run_root: &Path, adopted: &[String]) -> Result<Vec<String>, BackendError>;

    /// Where a machine's console log is, given its directory.
    fn console_log(&self, run_dir: &Path) -> PathBuf;

    /// Where a machine's console takes input while it is on, given its directory.
    fn console_socket(&self, run_dir: &Path) -> PathBuf;

    /// The socket of a machine's display while it is on, given its directory.
    fn display_socket(&self, run_dir: &Path) -> PathBuf;
}

/// A virtual machine that was started.
#[async_trait]
pub trait Vm: Send + Sync + 'static {
    /// Its process.
    fn pid(&self) -> u32;

    /// How it is run: `kvm`, `tcg`.
    fn accelerator(&self) -> String;

    /// Whether it stands still because its disk has no room. It goes on by itself when there is some.
    fn is_out_of_space(&self) -> bool;

    /// Waits until the guest says that it is up. Never returns where it does not.
    async fn booted(&self);

    /// Waits until the firmware says that it finds nothing to boot, and returns what it says. Never returns if it does not.
    async fn found_nothing_to_boot(&self) -> String {
        std::future::pending().await
    }

    /// Waits for its end. May be called by several, and after it ended.
    async fn exited(&self) -> VmExit;

    /// Asks the guest to switch itself off (ACPI) and waits; ends the process where it has not done so within
    /// `grace`.
    async fn stop(&self, grace: Duration) -> Result<VmExit, BackendError>;

    /// Ends the process at once, also while somebody waits in [`Vm::stop`], which then returns.
    async fn kill(&self) -> Result<(), BackendError>;

    /// Has the guest write to its disk what it can while it goes on, through its agent, and waits a little for a moment in which it has a
    /// processor to spare. Fails soon where none answers.
    async fn write_file_systems_out(&self) -> Result<(), BackendError>;

    /// Has the guest write everything to its disk and write no more until it is thawed.
    async fn freeze_file_systems(&self) -> Result<(), BackendError>;

    /// Ends that.
    async fn thaw_file_systems(&self) -> Result<(), BackendError>;

    /// Has the guest remove its machine's identity and the files of `also`, paths with wildcards, through its agent. Returns what it
    /// removed. It goes on without that, and is to be switched off. An error of kind `Conflict` where the guest has its own tool for
    /// that, which somebody must run.
    async fn generalise(&self, host_name: &str, also: &[String]) -> Result<Vec<String>, BackendError>;

    /// What its display shows now, as a PNG.
    async fn screenshot(&self) -> Result<Vec<u8>, BackendError>;

    /// The addresses by which others reach the guest, as its agent says.
    async fn addresses(&self) -> Result<Vec<IpAddr>, BackendError>;

    /// How many users are logged in, as its agent says.
    async fn users(&self) -> Result<usize, BackendError>;

    /// Runs a command in the guest, through its agent, which reads `input`.
    async fn exec(
        &self,
        argv: &[String],
        input: Vec<u8>,
        timeout: Duration,
    ) -> Result<ExecOutput, BackendError>;
}

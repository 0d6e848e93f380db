//! Runs machines with QEMU: implements the service's trait [`Hypervisor`] with `headwater_qemu`. It starts a VM, presses its power
//! button, ends it, and talks to its guest agent. It decides nothing about a machine's state: the service does, with
//! `control/service/src/lifecycle`.

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use headwater_api::platform::{self, Platform};
use headwater_api::{DiskTransport, FixedAddress, ProblemKind};
use headwater_qemu::{
    Acceleration, Boot, BootSign, CardAddress, Disk, Display, Error, Exec, Exit, ExitReason, Firmware,
    Generalised, Guest, GuestSpec, Identity, Lifetime, MacAddress, Network, OnReboot, RunFiles, SshHostKey,
    bridge, firmware, probe_acceleration, seed, tpm,
};
use headwater_service::backend::{
    BackendError, ExecOutput, Hypervisor, LeftVm, Vm, VmExit, VmPlan, VmRequest,
};

use crate::adapters::disks::{host_memory_bytes, scratch};

/// How often the power button is pressed: a guest that is still booting ignores it.
const POWER_BUTTON_INTERVAL: Duration = Duration::from_secs(3);

/// Timeout of the guest agent's first answer to a request.
const AGENT_TIMEOUT: Duration = Duration::from_secs(2);

/// The same for a guest that an earlier daemon may have left frozen.
const ADOPTED_AGENT_TIMEOUT: Duration = Duration::from_secs(60);

/// Timeout of each of the three questions that find out who is logged in. The last question starts programs in a guest
/// that may be busy.
const USERS_TIMEOUT: Duration = Duration::from_secs(20);

/// How long to wait after a sync for an idle processor of the guest.
const IDLE_SOON: Duration = Duration::from_millis(100);
/// The longest wait for an idle processor; a guest that is always busy is then frozen anyway.
const IDLE_TIMEOUT: Duration = Duration::from_secs(1);

const NO_AGENT: &str = "install qemu-guest-agent in the image; 'headwater machine console' works without, and shows whether the guest \
                        hangs";

/// The advice for a Windows guest: sysprep generalises it and switches it off.
const SYSPREP: &str = "run 'headwater machine exec NAME -- \"C:\\Windows\\System32\\Sysprep\\sysprep.exe\" /generalize /oobe /shutdown', and seal once the machine is off";

/// The duration of one wait for the end of a boot. Waits are repeated until the guest has booted or ended.
const BOOT_WAIT: Duration = Duration::from_secs(3600);

/// Runs machines with the QEMU of this host.
#[derive(Debug, Default)]
pub struct Qemu {
    /// Additional files that generalisation removes in a guest: absolute paths, which may have wildcards.
    pub also_removed: Arc<[String]>,
    /// Whether machines keep running when this process ends, because their disks are in another process.
    pub outlives: bool,
}

impl Qemu {
    fn vm(&self, guest: Guest, accelerator: &'static str) -> Arc<dyn Vm> {
        Arc::new(QemuVm { guest, accelerator, also_removed: Arc::clone(&self.also_removed) })
    }
}

#[async_trait]
impl Hypervisor for Qemu {
    async fn describe(&self) -> Result<String, BackendError> {
        probe_acceleration().await.map(|how| how.to_string()).map_err(failed)
    }

    async fn check(&self, plan: VmPlan<'_>) -> Result<(), BackendError> {
        // Only name, memory and processors are checked here; the other values are placeholders.
        let spec = GuestSpec {
            name: plan.name.to_owned(),
            uuid: uuid::Uuid::nil(),
            mac: MacAddress([0; 6]),
            memory_bytes: plan.memory_bytes,
            host_memory_bytes: host_memory_bytes(),
            cpus: plan.cpus,
            disk: Disk::nbd("/", ""),
            scratch: None,
            seed: None,
            run_dir: PathBuf::from("/"),
            firmware: Firmware::Bios,
            tpm: None,
            display: Display::None,
            network: Network::User,
            acceleration: Acceleration::Kvm,
            on_reboot: OnReboot::Exit,
        };
        spec.check().map_err(failed)?;
        plan.platform.check().map_err(|why| BackendError::new(ProblemKind::Invalid, why))?;
        has(plan.platform).await.map_err(failed)?;
        let identity = Identity {
            user_data: plan.user_data.map(|data| data.as_bytes().to_vec()),
            ..Identity::new(plan.host_name, uuid::Uuid::nil())
        };
        identity.check().map_err(failed)
    }

    async fn start(&self, request: VmRequest) -> Result<Arc<dyn Vm>, BackendError> {
        let acceleration = probe_acceleration().await.map_err(failed)?;
        let mac: MacAddress = request.mac.parse().map_err(|e| BackendError::new(ProblemKind::Failed, e))?;
        let files = RunFiles::new(&request.run_dir);
        let network = network(&request.platform);
        write_seed(&request, &files, &network, mac)?;
        let firmware = match request.platform.firmware {
            platform::Firmware::Bios => Firmware::Bios,
            platform::Firmware::Uefi => {
                let (kept, secure_boot) = (request.kept_variables.as_deref(), request.platform.secure_boot);
                Firmware::Uefi(firmware::prepare(&files, kept, secure_boot).map_err(failed)?)
            }
        };
        let tpm = request.platform.tpm.then(|| request.kept_tpm.unwrap_or_else(|| files.tpm_state()));
        let display = match request.platform.display {
            platform::Display::None => Display::None,
            platform::Display::Vnc => Display::Vnc,
        };
        let transport = request.transport;
        let disk_at = |socket: PathBuf| match transport {
            DiskTransport::VhostUser => Disk::vhost_user(socket),
            DiskTransport::Nbd => Disk::nbd(socket, ""),
        };
        let accelerator = match acceleration {
            Acceleration::Kvm => "kvm",
            Acceleration::Tcg { .. } => "tcg",
        };
        let spec = GuestSpec {
            name: request.name,
            uuid: request.uuid,
            mac,
            memory_bytes: request.memory_bytes,
            host_memory_bytes: host_memory_bytes(),
            cpus: request.cpus,
            disk: disk_at(request.disk_socket).with_sectors(request.sector_bytes),
            scratch: (request.platform.scratch_bytes > 0).then(|| disk_at(files.dir.join(scratch::SOCKET))),
            seed: Some(files.seed_disk()),
            run_dir: request.run_dir,
            firmware,
            tpm,
            display,
            network,
            acceleration,
            on_reboot: OnReboot::Exit,
        };
        let lifetime = if self.outlives { Lifetime::Own } else { Lifetime::WithParent };
        let guest = Guest::start_with(&spec, lifetime).await.map_err(failed)?;
        Ok(self.vm(guest, accelerator))
    }

    async fn adopt(&self, left: LeftVm) -> Result<Option<Arc<dyn Vm>>, BackendError> {
        let boot = left.boot_ms.map(|ms| Boot { seconds: ms as f64 / 1000.0, sign: BootSign::Agent });
        let guest = Guest::adopt(&left.name, &left.run_dir, left.cpus, boot).await.map_err(failed)?;
        let Some(guest) = guest else { return Ok(None) };
        // A daemon that was killed may have left the guest frozen. It froze the guest through the agent, so a guest whose
        // agent does not answer now most likely has none, and was not frozen.
        let frozen = guest.clone();
        tokio::spawn(async move {
            if frozen.agent().ping(ADOPTED_AGENT_TIMEOUT).await.is_ok()
                && let Err(error) = frozen.agent().thaw_file_systems().await
            {
                tracing::warn!(machine = frozen.name(), %error, "cannot thaw the file systems of the guest, which an earlier daemon may have frozen");
            }
        });
        let accelerator = if guest.has_kvm().await.map_err(failed)? { "kvm" } else { "tcg" };
        Ok(Some(self.vm(guest, accelerator)))
    }

    async fn sweep_orphans(&self, run_root: &Path, adopted: &[String]) -> Result<Vec<String>, BackendError> {
        let orphans = headwater_qemu::sweep_orphans(run_root, adopted).await.map_err(failed)?;
        if let Some(stuck) = orphans.iter().find(|orphan| !orphan.ended) {
            let message = format!("process {} of {} cannot be ended", stuck.pid, stuck.run_dir.display());
            return Err(BackendError::new(ProblemKind::Failed, message)
                .advise("an earlier daemon left it and it hangs in the kernel: restart the host"));
        }
        let name = |dir: &Path| dir.file_name().map(|name| name.to_string_lossy().into_owned());
        Ok(orphans.iter().filter_map(|orphan| name(&orphan.run_dir)).collect())
    }

    fn console_log(&self, run_dir: &Path) -> PathBuf {
        RunFiles::new(run_dir).console_log()
    }

    fn console_socket(&self, run_dir: &Path) -> PathBuf {
        RunFiles::new(run_dir).console_socket()
    }

    fn display_socket(&self, run_dir: &Path) -> PathBuf {
        RunFiles::new(run_dir).display_socket()
    }
}

/// Checks that this host has the programs and devices for a machine's firmware, TPM and network.
async fn has(platform: &Platform) -> Result<(), Error> {
    if platform.firmware == platform::Firmware::Uefi {
        firmware::find(platform.secure_boot)?;
    }
    if platform.tpm {
        tpm::check()?;
    }
    if let platform::Network::Bridge(name) = &platform.network {
        bridge::find(name).await?;
    }
    Ok(())
}

fn network(platform: &Platform) -> Network {
    match &platform.network {
        platform::Network::User => Network::User,
        platform::Network::Bridge(name) => Network::Bridge(name.clone()),
    }
}

fn card_address(fixed: &FixedAddress) -> CardAddress {
    let FixedAddress { ip, prefix, gateway, ref dns } = *fixed;
    CardAddress { ip, prefix, gateway, dns: dns.clone() }
}

fn write_seed(
    request: &VmRequest,
    files: &RunFiles,
    network: &Network,
    mac: MacAddress,
) -> Result<(), BackendError> {
    let identity = Identity {
        hostname: request.identity.host_name.clone(),
        instance_id: request.uuid.to_string(),
        machine_id: request.identity.machine_id.clone(),
        ssh_host_keys: vec![SshHostKey {
            kind: "ed25519".to_owned(),
            private: request.ssh_host_key_private.reveal().to_owned(),
            public: format!("{}\n", request.identity.ssh_host_key_public),
        }],
        address: request.identity.address.as_ref().map(card_address),
        user_data: request.identity.user_data.clone().map(String::into_bytes),
        personality: request.identity.personality.clone(),
    };
    seed::write(&files.seed_disk(), &identity, network, mac).map_err(failed)
}

struct QemuVm {
    guest: Guest,
    accelerator: &'static str,
    also_removed: Arc<[String]>,
}

#[async_trait]
impl Vm for QemuVm {
    fn pid(&self) -> u32 {
        self.guest.pid()
    }

    fn accelerator(&self) -> String {
        self.accelerator.to_owned()
    }

    fn is_out_of_space(&self) -> bool {
        self.guest.state().out_of_space
    }

    async fn booted(&self) {
        loop {
            match self.guest.wait_booted(BOOT_WAIT).await {
                Ok(_) => return,
                Err(Error::Timeout { .. }) => {}
                // The guest has ended, and will never have booted.
                Err(_) => std::future::pending().await,
            }
        }
    }

    async fn found_nothing_to_boot(&self) -> String {
        match self.guest.wait_no_boot().await {
            Ok(said) => said,
            Err(_) => std::future::pending().await,
        }
    }

    async fn exited(&self) -> VmExit {
        match self.guest.wait_exit().await {
            Ok(exit) => vm_exit(&exit),
            Err(e) => VmExit::Crashed { reason: e.to_string() },
        }
    }

    async fn stop(&self, grace: Duration) -> Result<VmExit, BackendError> {
        let again = async {
            loop {
                tokio::time::sleep(POWER_BUTTON_INTERVAL).await;
                // If QEMU has ended, this fails, and the other branch returns.
                let _ = self.guest.monitor().execute("system_powerdown", serde_json::json!({})).await;
            }
        };
        tokio::select! {
            exit = self.guest.stop(grace) => exit.map(|exit| vm_exit(&exit)).map_err(failed),
            // `again` never ends.
            () = again => Ok(VmExit::Killed),
        }
    }

    async fn kill(&self) -> Result<(), BackendError> {
        self.guest.kill().await.map(drop).map_err(failed)
    }

    async fn write_file_systems_out(&self) -> Result<(), BackendError> {
        let agent = self.guest.agent();
        agent.write_file_systems_out(AGENT_TIMEOUT).await.map_err(failed)?;
        // A freeze follows. A guest with busy processors answers and thaws slowly. During a wait for an idle processor it
        // may have written much, so sync again.
        if self.guest.was_busy(IDLE_SOON).await {
            self.guest.was_busy(IDLE_TIMEOUT).await;
            if let Err(error) = agent.write_file_systems_out(AGENT_TIMEOUT).await {
                // The agent answered a moment ago and is busy now; the freeze shows whether it answers.
                tracing::debug!(%error, "a busy guest did not sync again before its freeze");
            }
        }
        Ok(())
    }

    async fn freeze_file_systems(&self) -> Result<(), BackendError> {
        self.guest.agent().freeze_file_systems().await.map(drop).map_err(failed)
    }

    async fn thaw_file_systems(&self) -> Result<(), BackendError> {
        self.guest.agent().thaw_file_systems().await.map_err(failed)
    }

    async fn generalise(&self, host_name: &str, also: &[String]) -> Result<Vec<String>, BackendError> {
        let also = [&self.also_removed, also].concat();
        let done = self.guest.agent().generalise(host_name, &also, AGENT_TIMEOUT).await.map_err(failed)?;
        match done {
            Generalised::Removed(removed) => Ok(removed),
            Generalised::Windows => {
                Err(BackendError::new(ProblemKind::Conflict, "the guest is Windows").advise(SYSPREP))
            }
        }
    }

    async fn screenshot(&self) -> Result<Vec<u8>, BackendError> {
        self.guest.screenshot().await.map_err(failed)
    }

    async fn addresses(&self) -> Result<Vec<IpAddr>, BackendError> {
        self.guest.agent().addresses(AGENT_TIMEOUT).await.map_err(failed)
    }

    async fn users(&self) -> Result<usize, BackendError> {
        self.guest.agent().users(USERS_TIMEOUT).await.map_err(failed)
    }

    async fn exec(
        &self,
        argv: &[String],
        input: Vec<u8>,
        timeout: Duration,
    ) -> Result<ExecOutput, BackendError> {
        let exec = Exec { command: argv.to_vec(), input, timeout };
        let output = self.guest.agent().exec(&exec).await.map_err(failed)?;
        Ok(ExecOutput {
            exit_code: output.exit_code,
            stdout: output.stdout,
            stderr: output.stderr,
            truncated: output.truncated,
        })
    }
}

fn vm_exit(exit: &Exit) -> VmExit {
    match exit.reason {
        ExitReason::PoweredOff | ExitReason::Stopped => VmExit::PoweredOff,
        ExitReason::Rebooted => VmExit::Rebooted,
        ExitReason::Killed => VmExit::Killed,
        ExitReason::Crashed => {
            let last: Vec<&str> = exit.last_output.iter().rev().take(3).rev().map(String::as_str).collect();
            let said = if last.is_empty() { String::new() } else { format!(": {}", last.join("; ")) };
            VmExit::Crashed { reason: format!("QEMU ended unexpectedly ({}){said}", exit.status) }
        }
    }
}

fn failed(error: Error) -> BackendError {
    use std::io::ErrorKind::{FileTooLarge, QuotaExceeded, StorageFull};
    let kind = match &error {
        // A retry does not help: the package must be installed.
        Error::NotInstalled { .. } => ProblemKind::Failed,
        Error::Spec { .. } | Error::Bridge { .. } => ProblemKind::Invalid,
        Error::Io { source, .. } if matches!(source.kind(), StorageFull | QuotaExceeded | FileTooLarge) => {
            ProblemKind::NoSpace
        }
        Error::Gone(_) => ProblemKind::Conflict,
        Error::Io { .. }
        | Error::StartFailed { .. }
        | Error::TpmFailed { .. }
        | Error::Monitor { .. }
        | Error::Agent { .. }
        | Error::Protocol { .. }
        | Error::Timeout { .. }
        | Error::NoAgent { .. } => ProblemKind::Failed,
    };
    // Its message already contains its causes.
    let failed = BackendError::new(kind, error.to_string());
    match error {
        Error::NoAgent { .. } => failed.advise(NO_AGENT),
        _ => failed,
    }
}

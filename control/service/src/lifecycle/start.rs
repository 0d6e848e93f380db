//! Starts a machine: decides what it boots (`boot.rs`), opens the disk, starts the VM, and begins to watch it (`watch.rs`). If a step
//! fails, the earlier steps are undone. Called by the operations, and by restarts, resets, `resume`, rolls and drains.

use std::sync::Arc;
use std::time::{Duration, Instant};

use headwater_api::{BootFrom, Identity, MachineState, Wanted};
use headwater_db::{DbError, MachineRecord, PersistentDisk};
use uuid::Uuid;

use crate::Service;
use crate::answer::problem;
use crate::backend::{Disk, DiskRequest, Vm, VmRequest};
use crate::caller::Caller;
use crate::lifecycle::boot::{Boot, files_of};
use crate::lifecycle::{Active, LifecycleError};

/// Why a machine is started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StartReason {
    /// A caller has requested it.
    Request,
    /// A caller has requested it with a recording of its requests.
    Recorded,
    /// It was on until it was reset.
    Reset,
    /// Its guest rebooted; the start is retried until it succeeds.
    Restart,
    /// It was on when the daemon ended; the start is retried until it succeeds.
    Resume,
    /// It was on when the lease of its node ended; the start is retried until it succeeds.
    Fenced,
}

impl StartReason {
    /// The wanted state of a machine whose start failed.
    fn wanted_after_failure(self) -> Wanted {
        match self {
            Self::Request | Self::Recorded | Self::Reset => Wanted::Stopped,
            Self::Restart | Self::Resume | Self::Fenced => Wanted::Running,
        }
    }

    /// The reason for a start that is retried, in words.
    pub(super) fn because(self) -> &'static str {
        match self {
            Self::Resume => "it was on when the daemon ended",
            Self::Fenced => "it was on when its host lost contact and the host's lease expired",
            _ => "its guest restarted",
        }
    }
}

impl Service {
    /// Starts a machine; a machine that is on stays as it is. Returns when its VM runs.
    pub(crate) async fn start(&self, name: &str, caller: &Caller) -> Result<MachineRecord, LifecycleError> {
        self.start_because(name, caller, StartReason::Request).await
    }

    /// Starts a machine, and records its requests to its disk. Fails for a machine that is on.
    pub(crate) async fn start_recorded(
        &self,
        name: &str,
        caller: &Caller,
    ) -> Result<MachineRecord, LifecycleError> {
        self.start_because(name, caller, StartReason::Recorded).await
    }

    async fn start_because(
        &self,
        name: &str,
        caller: &Caller,
        reason: StartReason,
    ) -> Result<MachineRecord, LifecycleError> {
        let started = async {
            let (turn, record) = self.turn_of(name).await?;
            if record.connection.is_some() && reason == StartReason::Request {
                return self.start_in_cloud(record, caller).await;
            }
            if self.is_own(&record) && record.boot == BootFrom::Network && reason == StartReason::Request {
                // A command of the site may wait until the machine boots, which needs the turn.
                drop(turn);
                return self.wake(record, caller).await;
            }
            self.start_at_turn(record, caller, reason).await
        };
        started.await.map_err(|e| match e {
            LifecycleError::Db(source) => LifecycleError::NotNoted { machine: name.to_owned(), source },
            e => e,
        })
    }

    /// Starts a machine of any host; a machine that is on stays as it is. The caller holds its lock.
    async fn start_at_turn(
        &self,
        record: MachineRecord,
        caller: &Caller,
        reason: StartReason,
    ) -> Result<MachineRecord, LifecycleError> {
        if !self.is_own(&record) {
            let what = if reason == StartReason::Recorded { "record the requests of" } else { "start" };
            Self::not_in_cloud(what, &record)?;
            let how = if reason == StartReason::Recorded { "start?record=true" } else { "start" };
            return self.change_remote(record, "start", how, caller).await;
        }
        Self::is_vm("start", &record)?;
        match (self.active(record.uuid).is_some(), reason) {
            (true, StartReason::Recorded) => Err(LifecycleError::OnAndNotRecorded(record.name)),
            (true, _) => Ok(record),
            (false, _) => self.start_locked(record, caller, reason).await,
        }
    }

    /// Has a machine that boots from the network switch itself on. Whether it is on is known when it boots.
    async fn wake(&self, record: MachineRecord, caller: &Caller) -> Result<MachineRecord, LifecycleError> {
        let Some(waker) = self.waker() else {
            return Err(LifecycleError::Target { what: "start", machine: record.name });
        };
        let woken = waker.wake(&record.name, &record.mac).await;
        let detail = woken.map_err(LifecycleError::backend("start", &record.name))?;
        tracing::info!(machine = record.name, caller = caller.principal, "woken: {detail}");
        self.append(self.event(caller, format!("machine {}", record.name), "wake", detail)).await?;
        Ok(record)
    }

    /// Starts a machine that was moved, unless it was started or stopped since.
    pub(crate) async fn start_if_due(
        &self,
        uuid: Uuid,
        name: &str,
        caller: &Caller,
    ) -> Result<(), LifecycleError> {
        let _turn = self.lock(uuid).await;
        let record = self.record_of(uuid, name).await?;
        if !record.to_start {
            return Ok(());
        }
        self.start_at_turn(record, caller, StartReason::Request).await?;
        Ok(self.needs_no_start(uuid).await?)
    }

    /// Starts a machine that is off. The caller holds its lock.
    pub(crate) async fn start_locked(
        &self,
        record: MachineRecord,
        caller: &Caller,
        occasion: StartReason,
    ) -> Result<MachineRecord, LifecycleError> {
        if self.is_stopping() {
            return Err(LifecycleError::Stopping(record.name));
        }
        self.must_be_own("start", &record).await?;
        if self.is_fenced_off(&record) {
            return Err(LifecycleError::FencedOff(record.name));
        }
        let record = self.take_scheme(record, caller).await?;
        let mut record = self.with_young_key(record).await;
        let boot = match self.what_to_boot(&record, caller).await {
            Ok(boot) => boot,
            // The request is refused, but nothing is wrong with the machine.
            Err(e @ (LifecycleError::BeingSealed { .. } | LifecycleError::EditOver { .. })) => return Err(e),
            Err(e) => return self.start_failed(record, caller, occasion, None, e).await,
        };
        let version = boot.version.clone();
        record.wanted = Wanted::Running;
        record.state = MachineState::Starting;
        record.reason = None;
        record.boot_ms = None;
        record.started_at_ms = Some(self.now_ms());
        let asked_at = Instant::now();
        record.version = Some(format!("{}@{}", version.image, version.number));
        let detail = format!("{}@{}, {}{}", version.image, version.number, version.hash, boot.in_words());
        if let Err(e) = self.save(&record, caller, "start", detail).await {
            self.forget_begun(&boot, &record.name).await;
            return Err(e);
        }

        match self.bring_up(&record, &boot, occasion, asked_at).await {
            // The start takes seconds, and the daemon may have begun to stop meanwhile.
            Ok(active) if self.is_stopping() => {
                let reason = self.take_down(&record, &active).await;
                self.start_failed(record, caller, occasion, Some(&boot), reason).await
            }
            Ok(active) => {
                self.is_on_now(record.uuid, active.clone());
                if let Some(kept) = boot.kept.as_ref().filter(|kept| !kept.is_begun) {
                    self.note_begun(kept).await;
                }
                record.state = MachineState::Booting;
                let saved = self.save(&record, caller, "state", active.in_words()).await;
                self.watch(record.uuid, record.name.clone(), active);
                match saved {
                    Err(LifecycleError::Db(source)) => {
                        Err(LifecycleError::OnNotNoted { machine: record.name, source })
                    }
                    saved => saved.map(|()| record),
                }
            }
            Err(e) => self.start_failed(record, caller, occasion, Some(&boot), e).await,
        }
    }

    /// Records that a machine has opened a persistent disk, so that missing files mean that it is lost. If that fails, the
    /// next start records it.
    async fn note_begun(&self, kept: &PersistentDisk) {
        let note = async {
            let mut repo = self.db().write().await?;
            repo.persistent_disks().begun(kept.id).await?;
            repo.save().await
        };
        let noted: Result<(), DbError> = note.await;
        if let Err(error) = noted {
            tracing::warn!(disk = %kept.id, %error, "cannot record that a persistent disk was created");
        }
    }

    async fn start_failed(
        &self,
        mut record: MachineRecord,
        caller: &Caller,
        occasion: StartReason,
        boot: Option<&Boot>,
        error: LifecycleError,
    ) -> Result<MachineRecord, LifecycleError> {
        if let Some(boot) = boot {
            self.forget_begun(boot, &record.name).await;
        }
        let why = problem(&error).to_string();
        let wanted_after_failure = occasion.wanted_after_failure();
        let reason = match wanted_after_failure {
            Wanted::Stopped => why.clone(),
            Wanted::Running => {
                let because = occasion.because();
                format!("{because}, and its start is retried until it succeeds or the daemon ends: {why}")
            }
        };
        if boot.is_none()
            && wanted_after_failure == Wanted::Running
            && record.reason.as_ref() == Some(&reason)
        {
            // The history already has this reason.
            return Err(error);
        }
        record.state = MachineState::Stopped;
        record.wanted = wanted_after_failure;
        record.reason = Some(reason);
        self.remove_sockets(&record.name).await;
        if let Err(e) = self.save(&record, caller, "state", format!("the start failed: {why}")).await {
            // The caller needs the reason of the failure; that the machine is off is recorded when the database can be
            // written.
            tracing::error!(
                machine = %record.name,
                "the start of a machine failed, and the database cannot store this yet; it is stored when the database can be \
                 written again: {}",
                problem(&e)
            );
        }
        Err(error)
    }

    /// Undoes [`Service::bring_up`]. Returns the error: the daemon is stopping, or the VM could not be ended.
    async fn take_down(&self, record: &MachineRecord, active: &Active) -> LifecycleError {
        let ended = active.vm.stop(Duration::ZERO).await;
        if let Err(close) = active.disk.close().await {
            tracing::error!(machine = %record.name, "closing the disk of a machine failed: {}", problem(&close));
        }
        match ended {
            Ok(_) => LifecycleError::Stopping(record.name.clone()),
            Err(e) => LifecycleError::backend("end", &record.name)(e),
        }
    }

    /// Opens the disk and starts the VM. If the VM does not start, the disk is closed.
    async fn bring_up(
        &self,
        record: &MachineRecord,
        boot: &Boot,
        occasion: StartReason,
        asked_at: Instant,
    ) -> Result<Arc<Active>, LifecycleError> {
        let failed = || LifecycleError::backend("start", &record.name);
        let run_dir = self.run_dir(&record.name);
        tokio::fs::create_dir_all(&run_dir).await.map_err(|e| {
            let message = format!("cannot create the directory {}", run_dir.display());
            failed()(crate::backend::BackendError::from_io(message, e))
        })?;
        let version_hash = boot.version.hash.clone();
        let request = DiskRequest {
            machine: record.name.clone(),
            uuid: record.uuid,
            run_dir,
            version: boot.version.clone(),
            cache: boot.cache,
            kept: boot.kept.as_ref().map(files_of),
            goes_on: !matches!(occasion, StartReason::Request | StartReason::Recorded),
            is_recorded: occasion == StartReason::Recorded,
            transport: record.transport,
            firmware: record.platform.firmware,
            secure_boot: record.platform.secure_boot,
            scratch_bytes: record.platform.scratch_bytes,
        };
        let disk = self.disks().open(request).await.map_err(failed())?;
        // Opening a disk takes seconds, and the lease may be over by now.
        let started = match self.is_fenced_off(record) {
            true => Err(LifecycleError::FencedOff(record.name.clone())),
            false => self.start_vm(record, boot, &*disk).await,
        };
        match started {
            Ok(vm) => {
                let names = (record.name.clone(), record.catalog.clone());
                let active = Active::new(names, disk, vm, version_hash, asked_at);
                active.note_unused(&self.run_dir(&record.name));
                Ok(Arc::new(active))
            }
            Err(e) => {
                if let Err(close) = disk.close().await {
                    tracing::error!(machine = %record.name, "closing the disk of a machine failed: {}", problem(&close));
                }
                Err(e)
            }
        }
    }

    async fn start_vm(
        &self,
        record: &MachineRecord,
        boot: &Boot,
        disk: &dyn Disk,
    ) -> Result<Arc<dyn Vm>, LifecycleError> {
        let personality = self.personality_of_guest(record).await?;
        let request = VmRequest {
            name: record.name.clone(),
            uuid: record.uuid,
            mac: record.mac.clone(),
            run_dir: self.run_dir(&record.name),
            memory_bytes: record.memory_bytes,
            cpus: record.cpus,
            platform: record.platform.clone(),
            kept_variables: boot.kept.as_ref().map(|kept| self.kept_variables(&record.name, kept)),
            kept_tpm: boot.kept.as_ref().map(|kept| self.kept_tpm(&record.name, kept)),
            disk_socket: disk.socket().to_owned(),
            sector_bytes: disk.sector_bytes(),
            transport: record.transport,
            identity: Identity { personality, ..record.identity.clone() },
            ssh_host_key_private: record.ssh_host_key_private.clone(),
        };
        self.hypervisor().start(request).await.map_err(LifecycleError::backend("start", &record.name))
    }
}

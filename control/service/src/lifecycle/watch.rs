//! Watches a machine that is on: records when the guest has booted or the firmware finds nothing to boot, and puts the machine away when
//! its VM ends by itself or its disk is lost. `start.rs` and `adopt.rs` begin it. A stop that was requested cleans up itself.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use headwater_api::{Alarm, MachineState, Wanted};
use headwater_db::{MachineRecord, PersistentDisk};
use uuid::Uuid;

use crate::Service;
use crate::answer::problem;
use crate::backend::VmExit;
use crate::caller::Caller;
use crate::lifecycle::record::joined;
use crate::lifecycle::restart::DAEMON_ENDED;
use crate::lifecycle::start::StartReason;
use crate::lifecycle::{Active, FENCED, LifecycleError, restart};

/// The first pause before the failed restart of a machine whose guest rebooted is retried.
const RETRY_FIRST: Duration = Duration::from_secs(1);
const AGAIN_MOST: Duration = Duration::from_secs(60);

/// Whether the start of a machine that is on has progressed further than recorded, because the database could not be
/// written.
pub(super) fn is_behind(record: &MachineRecord, active: &Active) -> bool {
    match record.state {
        MachineState::Starting => true,
        MachineState::Booting => active.boot_time().is_some(),
        _ => false,
    }
}

/// The reboot in words, for the history.
fn how_it_restarted(kept: &[PersistentDisk]) -> &'static str {
    if kept.is_empty() {
        "the guest restarted; its disk is discarded"
    } else {
        "the guest restarted; its persistent disk stays"
    }
}

/// Ends a machine whose disk is gone: its guest would wait for ever.
async fn end_without_disk(name: &str, active: &Active, reason: String) -> VmExit {
    tracing::error!(machine = %name, "a machine is ended, because its disk is gone: {reason}");
    if let Err(error) = active.vm.kill().await {
        tracing::error!(machine = %name, "cannot end a machine whose disk is gone: {}", problem(&error));
    }
    active.vm.exited().await;
    VmExit::Crashed { reason }
}

impl Service {
    /// Watches a machine until its VM ends.
    pub(crate) fn watch(&self, uuid: Uuid, name: String, active: Arc<Active>) {
        let service = self.clone();
        tokio::spawn(async move {
            let exit = service.follow(uuid, &name, &active).await;
            let restarted = exit == VmExit::Rebooted;
            // Set before it is recorded as off, so that no task takes the machine for lost if that cannot be recorded.
            let _restart = restarted.then(|| service.begin_restart(uuid));
            match service.has_ended(uuid, &name, active, exit).await {
                Ok(()) => {}
                Err(e) if restarted => service.start_again(uuid, &name, StartReason::Restart, e).await,
                Err(e) => {
                    tracing::error!(machine = %name, "cannot record that a machine has ended: {}", problem(&e))
                }
            }
        });
    }

    /// Notes how far a machine's boot is, until its VM ends. A machine whose disk is gone is ended.
    async fn follow(&self, uuid: Uuid, name: &str, active: &Arc<Active>) -> VmExit {
        let firmware = self.follow_firmware(uuid, name, active);
        let ended = async {
            tokio::select! {
                exit = active.vm.exited() => exit,
                reason = active.disk.lost() => end_without_disk(name, active, reason).await,
            }
        };
        tokio::pin!(ended);
        tokio::select! {
            exit = &mut ended => exit,
            never = firmware => match never {},
            () = active.vm.booted() => {
                if let Err(e) = self.has_booted(uuid, name, active).await {
                    tracing::error!(
                        machine = %name,
                        "a machine has booted, and the database cannot store this yet; it is stored when the database can be \
                         written again: {}",
                        problem(&e)
                    );
                }
                ended.await
            }
        }
    }

    /// Notes that the firmware finds nothing to boot. The machine stays on, because a console may show more.
    async fn follow_firmware(&self, uuid: Uuid, name: &str, active: &Arc<Active>) -> Infallible {
        let said = active.vm.found_nothing_to_boot().await;
        if let Err(e) = self.nothing_to_boot(uuid, name, active, &said).await {
            tracing::error!(
                machine = %name,
                "the firmware of a machine finds nothing to boot, and the database cannot store this: {}",
                problem(&e)
            );
        }
        std::future::pending().await
    }

    async fn nothing_to_boot(
        &self,
        uuid: Uuid,
        name: &str,
        active: &Arc<Active>,
        said: &str,
    ) -> Result<(), LifecycleError> {
        let _turn = self.lock(uuid).await;
        let mut record = self.record(name).await?;
        let is_booting = matches!(record.state, MachineState::Starting | MachineState::Booting);
        if !self.is_present(uuid, active) || active.boot_time().is_some() || !is_booting {
            return Ok(());
        }
        let reason = format!("its firmware finds nothing to boot: '{said}'");
        record.state = MachineState::Booting;
        record.reason = Some(reason.clone());
        self.save(&record, &Caller::daemon(), "state", reason).await
    }

    async fn has_booted(&self, uuid: Uuid, name: &str, active: &Arc<Active>) -> Result<(), LifecycleError> {
        // The time is taken now, because the lock or the database may be slow.
        active.has_booted();
        let _turn = self.lock(uuid).await;
        if !self.is_present(uuid, active) {
            return Ok(());
        }
        let record = self.record(name).await?;
        self.catch_up(record, active).await
    }

    /// Records the progress of a machine's start, if it is further than recorded. The caller holds the machine's lock.
    pub(super) async fn catch_up(
        &self,
        mut record: MachineRecord,
        active: &Active,
    ) -> Result<(), LifecycleError> {
        if !is_behind(&record, active) {
            return Ok(());
        }
        let detail = match active.boot_time() {
            Some(took) => {
                let boot_ms = u64::try_from(took.as_millis()).unwrap_or(u64::MAX);
                record.state = MachineState::Running;
                record.boot_ms = Some(boot_ms);
                record.reason = None;
                format!("booted in {}.{:03} s", boot_ms / 1000, boot_ms % 1000)
            }
            None => {
                record.state = MachineState::Booting;
                active.in_words()
            }
        };
        self.save(&record, &Caller::daemon(), "state", detail).await
    }

    async fn has_ended(
        &self,
        uuid: Uuid,
        name: &str,
        active: Arc<Active>,
        exit: VmExit,
    ) -> Result<(), LifecycleError> {
        let turn = self.lock(uuid).await;
        if !self.is_present(uuid, &active) {
            // The task that stopped it has cleaned up.
            return Ok(());
        }
        // Done even if the database cannot be read or written: the record then still
        // says that the machine is on, and the next comparison finds it lost.
        let unsaved = self.put_away(uuid, name).await;
        let quick_boots = active.quick_boots();
        // Drops its disks with their RAM; the next start opens its own.
        drop(active);
        let mut record = self.record(name).await?;
        let daemon = Caller::daemon();
        if matches!(exit, VmExit::Killed | VmExit::Crashed { .. }) && self.is_fenced_off(&record) {
            // The guard ended it first. It is restarted with the next lease.
            let reason = joined(Some(FENCED.to_owned()), unsaved);
            return self.switched_off(&mut record, &daemon, MachineState::Stopped, reason, FENCED).await;
        }
        match exit {
            VmExit::PoweredOff => {
                record.wanted = Wanted::Stopped;
                let detail = "the guest shut down";
                self.switched_off(&mut record, &daemon, MachineState::Stopped, unsaved, detail).await
            }
            VmExit::Rebooted => {
                let kept = self.db().read().await?.persistent_disks().of_machine(uuid).await?;
                let detail = how_it_restarted(&kept);
                let pause = restart::pause(quick_boots);
                let reason = if !pause.is_zero() {
                    let seconds = pause.as_secs();
                    Some(format!("the guest keeps restarting; the machine is restarted in {seconds} s"))
                } else if self.is_any_sealing(&kept) {
                    Some(
                        "the guest restarted; the machine is restarted when the version of its disk is made"
                            .to_owned(),
                    )
                } else {
                    None
                };
                let reason = joined(reason, unsaved);
                self.switched_off(&mut record, &daemon, MachineState::Stopped, reason, detail).await?;
                let Some((_turn, record)) = self.pause_restart(pause, &kept, turn, record).await? else {
                    return Ok(());
                };
                self.start_locked(record, &daemon, StartReason::Restart).await?;
                if let Some(started) = self.active(uuid) {
                    started.follows_quick_boots(quick_boots);
                }
                Ok(())
            }
            VmExit::Killed => {
                // Ended by the end of the daemon, which records nothing more. Any other caller records its own reason.
                let is_left_wanted = self.is_stopping() && record.wanted == Wanted::Running;
                let how = if is_left_wanted {
                    format!("it was ended; {DAEMON_ENDED}")
                } else {
                    "it was ended".to_owned()
                };
                let reason = joined(Some(how), unsaved);
                self.switched_off(&mut record, &daemon, MachineState::Stopped, reason, "it was ended").await
            }
            VmExit::Crashed { reason } => {
                let (detail, reason) = (reason.clone(), joined(Some(reason), unsaved));
                self.switched_off(&mut record, &daemon, MachineState::Crashed, reason, detail).await
            }
        }
    }

    /// Retries the start of a machine whose guest rebooted, or that was on when the daemon ended, while it is wanted:
    /// the failure may be temporary, for instance of the store.
    pub(super) async fn start_again(
        &self,
        uuid: Uuid,
        name: &str,
        occasion: StartReason,
        mut error: LifecycleError,
    ) {
        let because = occasion.because();
        let mut pause = RETRY_FIRST;
        while !self.is_stopping() {
            let mut why = problem(&error);
            tracing::error!(machine = %name, "{because}, and its restart failed: {why}");
            let again = "the start is retried until it succeeds";
            let advice = why.advice.take();
            let alarm = Alarm {
                subject: format!("machine {name}"),
                since_ms: self.now_ms(),
                message: format!("{because}, and its restart failed: {why}"),
                advice: advice.map_or_else(|| again.to_owned(), |advice| format!("{advice}; {again}")),
            };
            self.restart_failed(uuid, alarm);
            tokio::time::sleep(pause).await;
            pause = pause.saturating_mul(2).min(AGAIN_MOST);
            match self.start_if_wanted(uuid, name, occasion).await {
                Ok(()) => return,
                Err(e) => error = e,
            }
        }
    }

    /// Starts a machine whose guest rebooted, or that was on when the daemon ended, if it is off and wanted. That it is
    /// off may not be recorded yet.
    pub(super) async fn start_if_wanted(
        &self,
        uuid: Uuid,
        name: &str,
        occasion: StartReason,
    ) -> Result<(), LifecycleError> {
        let is_wanted = |record: &MachineRecord| {
            let is_off = match record.state {
                MachineState::Stopped => true,
                MachineState::Lost => matches!(occasion, StartReason::Resume | StartReason::Fenced),
                _ => self.is_unrecorded_restart(record),
            };
            let is_wanted = record.uuid == uuid && record.wanted == Wanted::Running;
            is_wanted && is_off && self.is_own(record) && self.active(uuid).is_none()
        };
        let found = self.db().read().await?.machines().by_name(name).await?;
        if !found.as_ref().is_some_and(is_wanted) {
            return Ok(());
        }
        let _turn = self.lock(uuid).await;
        // Check again, now that no other task changes it.
        let found = self.db().read().await?.machines().by_name(name).await?;
        let Some(mut record) = found.filter(is_wanted) else { return Ok(()) };
        let daemon = Caller::daemon();
        if record.state.is_active() {
            let kept = self.db().read().await?.persistent_disks().of_machine(uuid).await?;
            let detail = how_it_restarted(&kept);
            self.switched_off(&mut record, &daemon, MachineState::Stopped, None, detail).await?;
        }
        self.start_locked(record, &daemon, occasion).await.map(drop)
    }

    /// Whether the guest of a machine that is recorded as on has rebooted, so that the machine is off until its restart.
    pub(super) fn is_unrecorded_restart(&self, record: &MachineRecord) -> bool {
        record.state.is_active() && self.is_restarting(record.uuid) && self.active(record.uuid).is_none()
    }

    /// Whether a machine is on, without having been off since `active` was read.
    pub(crate) fn is_present(&self, uuid: Uuid, active: &Arc<Active>) -> bool {
        self.active(uuid).is_some_and(|present| Arc::ptr_eq(&present, active))
    }
}

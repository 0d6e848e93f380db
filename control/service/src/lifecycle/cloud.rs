//! Machines in a cloud: starts, stops, resets and removes them through [`CloudMachines`], and completes what an earlier daemon
//! has left. `start.rs` and `stop.rs` call this for a machine with a connection, before they look for its host.
//!
//! | state | wanted | meaning | after a restart of the daemon |
//! |---|---|---|---|
//! | `starting` | running | it is being created | the creation continues, with the recorded version |
//! | `running` | running | the cloud has created it | the cloud is asked for it |
//! | `stopping` | running | it is being reset | the reset is repeated |
//! | `stopping` | stopped | it is being deleted | the deletion continues |
//! | `stopped`, `created` | stopped | it does not exist; its address may | the cloud is asked for it, once |
//! | `stopped`, with `cloud` | stopped | somebody has switched it off in the cloud | the cloud is asked for it |
//! | `lost` | running | somebody has deleted it in the cloud | the cloud is asked for it |
//!
//! - The wanted state and the event that names the caller are saved before the first request. Each of these states can be
//!   continued, because [`CloudMachines`] completes what was left: a crash at any point leaves no second machine, and no
//!   machine that nobody knows.
//! - Off means deleted: an off machine costs nothing, and each start has a pristine disk.
//! - A failed start leaves nothing: the machine is `stopping` until what was made is deleted. A failed deletion is repeated
//!   each minute.
//! - A reset, or a start that another daemon began, is repeated too while the cloud cannot be reached or refuses the identity:
//!   the machine may be on, and a deletion would end its work.
//! - The holder of a machine's lock waits for the cloud, for minutes. A forced stop interrupts that, and so does the end of
//!   the daemon.
//!
//! [`CloudMachines`]: crate::backend::CloudMachines

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use headwater_api::{
    CloudMachine, ImageVersion, MachineState, ProblemKind, PublishState, PublishedImage, Wanted,
};
use headwater_db::{ConnectionRecord, DbError, MachineRecord, Secret};
use tokio::sync::{OwnedMutexGuard, Semaphore, SemaphorePermit};
use tokio::time::MissedTickBehavior;
use uuid::Uuid;

use crate::Service;
use crate::answer::{Explain, problem};
use crate::backend::{BackendError, Cloud, CloudOrder, CloudStarted};
use crate::caller::Caller;
use crate::lifecycle::LifecycleError;

/// How often machines that are neither on nor off are looked for.
const CONTINUE_INTERVAL: Duration = Duration::from_secs(60);

/// In each of so many rounds, the cloud is asked for the machines that are on, or that others have changed: every 5 minutes.
const LOOK_EVERY: u64 = 5;

/// How many machines are continued or asked for at the same time. Azure permits 12 requests a minute for one machine, and
/// thousands for all.
const CONTINUED_AT_A_TIME: usize = 16;

/// The end of the reason of a machine whose deletion, reset or repeated start has failed.
const TRIED_AGAIN: &str = "; it is tried again";

/// Disks in a cloud have whole GiB.
const GIB: u64 = 1 << 30;

/// The machines that wait for their turn to be continued or asked for. A machine is locked only when its turn comes, so that a
/// stop does not wait for other machines.
#[derive(Debug)]
struct Turns {
    places: Semaphore,
    /// Each machine waits once, however many rounds there are.
    waiting: Mutex<BTreeSet<Uuid>>,
}

impl Turns {
    /// Waits until few enough other machines are worked on.
    async fn wait(&self, machine: Uuid) -> Option<SemaphorePermit<'_>> {
        // The semaphore is never closed.
        let place = self.places.acquire().await.ok();
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner).remove(&machine);
        place
    }
}

/// For which machines that are on or off the cloud is asked in a round.
#[derive(Clone, Copy)]
enum Looks {
    /// For all, because the database may be older than the machines: it may have been restored.
    All,
    /// For those that exist in the cloud, or whose end others have caused.
    Known,
    Nothing,
}

/// A cloud and the connection of a machine.
struct CloudPlace {
    cloud: Arc<dyn Cloud>,
    connection: ConnectionRecord,
}

/// Whether a machine in a cloud must be continued: a daemon has left it between on and off.
fn is_left(record: &MachineRecord) -> bool {
    matches!(record.state, MachineState::Starting | MachineState::Booting | MachineState::Stopping)
}

/// Whether a machine certainly does not exist in its cloud.
fn is_gone(record: &MachineRecord) -> bool {
    matches!(record.state, MachineState::Created | MachineState::Stopped) && record.cloud.is_none()
}

/// The result of work in a cloud, in words.
fn in_words(started: &CloudStarted) -> String {
    match started.refused.as_slice() {
        [] => started.machine.to_string(),
        refused => format!("{}; refused before: {}", started.machine, refused.join("; ")),
    }
}

impl Service {
    /// Starts a machine in a cloud; a machine that is on stays as it is. Returns when it has booted. The caller holds its
    /// lock.
    pub(super) async fn start_in_cloud(
        &self,
        record: MachineRecord,
        caller: &Caller,
    ) -> Result<MachineRecord, LifecycleError> {
        if self.is_stopping() {
            return Err(LifecycleError::Stopping(record.name));
        }
        match (record.state, record.wanted) {
            (MachineState::Running, _) => return Ok(record),
            (MachineState::Stopping, Wanted::Running) => return self.finish_reset(record).await,
            // An earlier deletion must end first, and a machine that others have switched off must go, with its disk.
            (MachineState::Stopping | MachineState::Stopped, Wanted::Stopped) if !is_gone(&record) => {
                let record = self.finish_stop(record).await?;
                return self.begin_start(record, caller).await;
            }
            (MachineState::Starting, _) => return self.continue_start(record).await,
            _ => {}
        }
        self.begin_start(record, caller).await
    }

    async fn begin_start(
        &self,
        mut record: MachineRecord,
        caller: &Caller,
    ) -> Result<MachineRecord, LifecycleError> {
        let version = self.version_of("start", &record, record.reference()).await?;
        let order = self.cloud_order("start", &record, &version).await?;
        record.wanted = Wanted::Running;
        record.state = MachineState::Starting;
        record.reason = None;
        record.boot_ms = None;
        record.started_at_ms = Some(self.now_ms());
        record.version = Some(name_of(&version));
        let detail = format!("{}, {}", name_of(&version), version.hash);
        self.save(&record, caller, "start", detail).await?;
        self.finish_start(record, order, false).await
    }

    /// Continues a start that was interrupted, with the version that it had.
    async fn continue_start(&self, record: MachineRecord) -> Result<MachineRecord, LifecycleError> {
        let reference = record.version.clone().unwrap_or_else(|| record.reference().to_owned());
        let order = async {
            let version = self.version_of("start", &record, &reference).await?;
            self.cloud_order("start", &record, &version).await
        };
        match order.await {
            Ok(order) => self.finish_start(record, order, true).await,
            // Tried again.
            Err(error) if is_passing(&error) => Err(error),
            Err(error) => Err(self.start_failed_in_cloud(record, error).await),
        }
    }

    async fn finish_start(
        &self,
        record: MachineRecord,
        order: CloudOrder,
        is_repeated: bool,
    ) -> Result<MachineRecord, LifecycleError> {
        let asked_at = Instant::now();
        let cloud = self.cloud_of("start", &record)?;
        let started = self.unless_interrupted(record.uuid, cloud.start_machine(&order)).await;
        self.started_in_cloud("start", record, started, asked_at, is_repeated).await
    }

    /// Records the end of a start or reset. If it is repeated, a failure that passes changes nothing: the machine may be on.
    async fn started_in_cloud(
        &self,
        what: &'static str,
        mut record: MachineRecord,
        started: Result<Result<CloudStarted, BackendError>, &'static str>,
        asked_at: Instant,
        is_repeated: bool,
    ) -> Result<MachineRecord, LifecycleError> {
        let started = match started {
            Ok(Ok(started)) => started,
            Ok(Err(error)) => {
                let error = LifecycleError::backend(what, &record.name)(error);
                if is_repeated && is_passing(&error) {
                    self.note_cloud_failure(&mut record, &error).await;
                    return Err(error);
                }
                return Err(self.start_failed_in_cloud(record, error).await);
            }
            Err(why) => return Err(LifecycleError::CloudLeft { what, machine: record.name, why }),
        };
        let detail = in_words(&started);
        record.state = MachineState::Running;
        record.reason = None;
        record.boot_ms = u64::try_from(asked_at.elapsed().as_millis()).ok();
        record.cloud = Some(started.machine);
        match self.save(&record, &Caller::daemon(), "state", detail).await {
            Err(LifecycleError::Db(source)) => {
                Err(LifecycleError::OnNotNoted { machine: record.name, source })
            }
            saved => saved.map(|()| record),
        }
    }

    /// Records that a start has failed, and deletes what it has made. Returns the error of the start.
    async fn start_failed_in_cloud(
        &self,
        mut record: MachineRecord,
        error: LifecycleError,
    ) -> LifecycleError {
        let why = problem(&error).to_string();
        record.wanted = Wanted::Stopped;
        record.state = MachineState::Stopping;
        record.reason = Some(why.clone());
        let name = record.name.clone();
        let detail = format!("the start failed: {why}");
        let noted = self.save(&record, &Caller::daemon(), "state", detail).await;
        let cleaned = match noted {
            Ok(()) => self.finish_stop(record).await.map(drop),
            noted => noted,
        };
        if let Err(later) = cleaned {
            tracing::warn!(
                machine = name,
                "what a failed start has made in the cloud is deleted later: {}",
                problem(&later)
            );
        }
        error
    }

    /// Deletes a machine in its cloud; it stays in its catalog. A machine that is off stays off. The caller holds its lock.
    pub(super) async fn stop_in_cloud(
        &self,
        mut record: MachineRecord,
        caller: &Caller,
    ) -> Result<MachineRecord, LifecycleError> {
        if is_gone(&record) {
            return Ok(record);
        }
        record.wanted = Wanted::Stopped;
        record.state = MachineState::Stopping;
        record.reason = None;
        let detail = "its virtual machine and disk in the cloud are being deleted";
        self.save(&record, caller, "stop", detail).await?;
        self.finish_stop(record).await
    }

    async fn finish_stop(&self, mut record: MachineRecord) -> Result<MachineRecord, LifecycleError> {
        let CloudPlace { cloud, connection } = self.place_of("stop", &record).await?;
        let stopping = cloud.stop_machine(&connection, record.uuid);
        match self.unless_interrupted(record.uuid, stopping).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => {
                let error = LifecycleError::backend("stop", &record.name)(error);
                self.note_cloud_failure(&mut record, &error).await;
                return Err(error);
            }
            Err(why) => return Err(LifecycleError::CloudLeft { what: "stop", machine: record.name, why }),
        }
        record.state = MachineState::Stopped;
        record.cloud = None;
        record.reason = record.reason.filter(|why| !why.ends_with(TRIED_AGAIN));
        // If this fails, the deletion is repeated and recorded later.
        self.save(&record, &Caller::daemon(), "state", "it is off").await?;
        Ok(record)
    }

    /// Shows why a deletion, a reset or a repeated start has failed, unless a reason is shown already. The reason of a failed
    /// start stays.
    async fn note_cloud_failure(&self, record: &mut MachineRecord, error: &LifecycleError) {
        let reason = problem(error).to_string();
        if record.reason.is_some() {
            tracing::warn!(machine = record.name, "{reason}{TRIED_AGAIN}");
            return;
        }
        record.reason = Some(format!("{reason}{TRIED_AGAIN}"));
        if let Err(unsaved) = self.save(record, &Caller::daemon(), "state", reason).await {
            tracing::error!(
                machine = record.name,
                "cannot record a failure in the cloud: {}",
                problem(&unsaved)
            );
        }
    }

    /// Gives a machine a pristine disk of the version that it boots next. A machine that is off stays off. The caller holds
    /// its lock.
    pub(super) async fn reset_in_cloud(
        &self,
        mut record: MachineRecord,
        caller: &Caller,
    ) -> Result<MachineRecord, LifecycleError> {
        if record.wanted == Wanted::Stopped {
            let record = if is_gone(&record) { record } else { self.stop_in_cloud(record, caller).await? };
            self.save(&record, caller, "reset", "its disk is pristine at its next start").await?;
            return Ok(record);
        }
        if self.is_stopping() {
            return Err(LifecycleError::Stopping(record.name));
        }
        // First, so that the machine stays as it is if this fails.
        let version = self.version_of("reset", &record, record.reference()).await?;
        let order = self.cloud_order("reset", &record, &version).await?;
        let checked = self.cloud_of("reset", &record)?.check_reset(&order).await;
        checked.map_err(LifecycleError::backend("reset", &record.name))?;
        record.state = MachineState::Stopping;
        record.reason = None;
        self.save(&record, caller, "reset", "its disk is discarded and it restarts").await?;
        self.finish_reset(record).await
    }

    async fn finish_reset(&self, mut record: MachineRecord) -> Result<MachineRecord, LifecycleError> {
        let asked_at = Instant::now();
        let order = async {
            let version = self.version_of("reset", &record, record.reference()).await?;
            let order = self.cloud_order("reset", &record, &version).await?;
            Ok::<_, LifecycleError>((name_of(&version), order))
        };
        let (version, order) = match order.await {
            Ok(order) => order,
            Err(error) if is_passing(&error) => return Err(error),
            Err(error) => return Err(self.start_failed_in_cloud(record, error).await),
        };
        let cloud = self.cloud_of("reset", &record)?;
        let reset = self.unless_interrupted(record.uuid, cloud.reset_machine(&order)).await;
        if matches!(reset, Ok(Ok(_))) {
            record.version = Some(version);
            record.started_at_ms = Some(self.now_ms());
        }
        self.started_in_cloud("reset", record, reset, asked_at, true).await
    }

    /// Removes a machine that is off; with `force` also a machine that is on. The caller holds its lock.
    pub(super) async fn remove_in_cloud(
        &self,
        mut record: MachineRecord,
        force: bool,
        caller: &Caller,
    ) -> Result<(), LifecycleError> {
        if !force && record.state.is_active() {
            let state = record.state.name();
            return Err(LifecycleError::NotOff { machine: record.name, state });
        }
        let (name, uuid) = (record.name.clone(), record.uuid);
        if record.state != MachineState::Created {
            let CloudPlace { cloud, connection } = self.place_of("remove", &record).await?;
            record.wanted = Wanted::Stopped;
            record.state = MachineState::Stopping;
            record.reason = None;
            let detail = "its virtual machine, and all that belongs to it in the cloud, are being deleted";
            self.save(&record, caller, "remove", detail).await?;
            let removing = cloud.remove_machine(&connection, uuid);
            match self.unless_interrupted(uuid, removing).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => {
                    let error = LifecycleError::backend("remove", &name)(error);
                    self.note_cloud_failure(&mut record, &error).await;
                    return Err(error);
                }
                Err(why) => return Err(LifecycleError::CloudLeft { what: "remove", machine: name, why }),
            }
        }
        let mut repo = self.db().write().await?;
        repo.machines().remove(uuid).await?;
        let event = self.event(caller, format!("machine {name}"), "removed", format!("{uuid}"));
        repo.events().append(event).await?;
        repo.save().await?;
        tracing::info!(machine = %name, caller = %caller.principal, "removed");
        self.roots_changed();
        self.forget_lock(uuid);
        Ok(())
    }

    fn cloud_of(&self, what: &'static str, record: &MachineRecord) -> Result<Arc<dyn Cloud>, LifecycleError> {
        self.cloud().map_err(|problem| {
            LifecycleError::backend(what, &record.name)(BackendError::new(problem.kind, problem.message))
        })
    }

    async fn place_of(
        &self,
        what: &'static str,
        record: &MachineRecord,
    ) -> Result<CloudPlace, LifecycleError> {
        let cloud = self.cloud_of(what, record)?;
        let name = record.connection.as_deref().unwrap_or_default();
        let found = self.db().read().await?.clouds().by_name(name).await?;
        let connection = found.ok_or_else(|| {
            let missing = format!("there is no connection '{name}'");
            LifecycleError::backend(what, &record.name)(BackendError::new(ProblemKind::NotFound, missing))
        })?;
        Ok(CloudPlace { cloud, connection })
    }

    /// The order that creates a machine of this version. Fails if the version is not published.
    async fn cloud_order(
        &self,
        what: &'static str,
        record: &MachineRecord,
        version: &ImageVersion,
    ) -> Result<CloudOrder, LifecycleError> {
        let CloudPlace { connection, .. } = self.place_of(what, record).await?;
        let mut repo = self.db().read().await?;
        let catalog = match &record.catalog {
            Some(catalog) => repo.catalogs().by_name(catalog).await?,
            None => None,
        };
        // With its user data, which lists do not have.
        let whole = repo.machines().by_uuid(record.uuid).await?;
        drop(repo);
        let connection_name = connection.connection.name.clone();
        let (Some(catalog), Some(whole)) = (catalog, whole) else {
            return Err(LifecycleError::Unknown(record.name.clone()));
        };
        let Some(scheme) = catalog.cloud else { return Err(LifecycleError::Unknown(record.name.clone())) };
        let os_disk_bytes = os_disk_bytes(scheme.os_disk_bytes, version);
        // The catalog may have got a larger version since it was created.
        if os_disk_bytes < version.size_bytes {
            let (name, needs) = (name_of(version), version.size_bytes);
            let small = format!(
                "the OS disks of catalog '{}' have {os_disk_bytes} bytes, and {name} needs {needs}",
                catalog.name
            );
            let small = BackendError::new(ProblemKind::Invalid, small).advise(
                "create another catalog with a larger --os-disk, or let this one boot a smaller version",
            );
            return Err(LifecycleError::backend(what, &record.name)(small));
        }
        let Some(published) = self.published_version(&connection_name, version).await? else {
            return Err(LifecycleError::NotPublished {
                what,
                machine: record.name.clone(),
                version: name_of(version),
                connection: connection_name,
            });
        };
        Ok(CloudOrder {
            connection,
            os_disk_bytes,
            scheme,
            published,
            uuid: record.uuid,
            host_name: whole.identity.host_name,
            mark: format!("{}@{}", catalog.name, whole.scheme.unwrap_or(1)),
            user_data: whole.identity.user_data.map(Secret::new),
        })
    }

    /// The row of a version from which machines can be created with a connection.
    pub(crate) async fn published_version(
        &self,
        connection: &str,
        version: &ImageVersion,
    ) -> Result<Option<PublishedImage>, DbError> {
        let all = self.db().read().await?.clouds().published().await?;
        Ok(all.into_iter().find(|row| {
            let is_it =
                row.image == version.image && row.version == version.number && row.hash == version.hash;
            is_it && row.connection == connection && row.state == PublishState::Published
        }))
    }

    /// Continues the machines that an earlier daemon, or an interrupted operation, has left between on and off, and asks the
    /// clouds for the machines that are on. Runs until the daemon stops.
    pub async fn keep_clouds(&self) {
        let mut interval = tokio::time::interval(CONTINUE_INTERVAL);
        interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let places = Semaphore::new(CONTINUED_AT_A_TIME);
        let turns = Arc::new(Turns { places, waiting: Mutex::default() });
        for round in 0_u64.. {
            interval.tick().await;
            if self.is_stopping() {
                return;
            }
            let looks = match round {
                0 => Looks::All,
                round if round % LOOK_EVERY == 0 => Looks::Known,
                _ => Looks::Nothing,
            };
            if let Err(error) = self.look_after_clouds(&turns, looks).await
                && error.retry_after_s().is_none()
            {
                tracing::error!("cannot look after the machines in clouds: {}", problem(&error));
            }
        }
    }

    async fn look_after_clouds(&self, turns: &Arc<Turns>, looks: Looks) -> Result<(), DbError> {
        let machines = self.db().read().await?.machines().of_clouds().await?;
        let is_due = |record: &MachineRecord| {
            is_left(record)
                || match looks {
                    Looks::All => true,
                    Looks::Known => !is_gone(record),
                    Looks::Nothing => false,
                }
        };
        for record in machines.into_iter().filter(is_due) {
            if !turns.waiting.lock().unwrap_or_else(PoisonError::into_inner).insert(record.uuid) {
                continue;
            }
            let (service, turns) = (self.clone(), Arc::clone(turns));
            tokio::spawn(async move {
                let _place = turns.wait(record.uuid).await;
                // Otherwise somebody changes it now.
                let Some(turn) = service.try_lock(record.uuid) else { return };
                if let Err(error) = service.continue_in_cloud(&turn, &record).await {
                    tracing::warn!(machine = record.name, "{}", problem(&error));
                }
            });
        }
        Ok(())
    }

    async fn continue_in_cloud(
        &self,
        _turn: &OwnedMutexGuard<()>,
        seen: &MachineRecord,
    ) -> Result<(), LifecycleError> {
        if self.is_stopping() {
            return Ok(());
        }
        let record = self.record_of(seen.uuid, &seen.name).await?;
        match (record.state, record.wanted) {
            (MachineState::Starting | MachineState::Booting, _) => {
                self.continue_start(record).await.map(drop)
            }
            (MachineState::Stopping, Wanted::Running) => self.finish_reset(record).await.map(drop),
            (MachineState::Stopping, Wanted::Stopped) => self.finish_stop(record).await.map(drop),
            (MachineState::Running, _) => self.look_in_cloud(record).await,
            (MachineState::Created | MachineState::Stopped | MachineState::Lost, _) => {
                self.look_again_in_cloud(record).await
            }
            _ => Ok(()),
        }
    }

    /// Asks the cloud for a machine that is on, and records what others have done to it there.
    async fn look_in_cloud(&self, mut record: MachineRecord) -> Result<(), LifecycleError> {
        let CloudPlace { cloud, connection } = self.place_of("look after", &record).await?;
        let asking = cloud.machine_state(&connection, record.uuid);
        let Ok(there) = self.unless_interrupted(record.uuid, asking).await else { return Ok(()) };
        let there = there.map_err(LifecycleError::backend("look after", &record.name))?;
        let before = record.cloud.take();
        let detail = match there {
            None => {
                record.state = MachineState::Lost;
                "somebody has deleted it in the cloud; start it to boot a pristine disk".to_owned()
            }
            Some(there) if there.is_off => {
                record.state = MachineState::Stopped;
                record.wanted = Wanted::Stopped;
                record.cloud = Some(there.machine);
                switched_off(&record.name)
            }
            Some(there) => {
                let is_new = before.as_ref().is_some_and(|before| before.vm_id != there.machine.vm_id);
                let is_known = before.as_ref() == Some(&there.machine);
                record.cloud = Some(there.machine);
                if is_known {
                    return Ok(());
                }
                if !is_new {
                    let shown = record.cloud.as_ref().map(CloudMachine::to_string).unwrap_or_default();
                    return self.save(&record, &Caller::daemon(), "state", shown).await;
                }
                "somebody has created it again in the cloud: its disk is pristine".to_owned()
            }
        };
        record.reason = Some(detail.clone());
        self.save(&record, &Caller::daemon(), "state", detail).await
    }

    /// Asks the cloud for a machine that is off or lost, and records if it is there: otherwise it costs for ever, and nobody
    /// knows it.
    async fn look_again_in_cloud(&self, mut record: MachineRecord) -> Result<(), LifecycleError> {
        let CloudPlace { cloud, connection } = self.place_of("look after", &record).await?;
        let asking = cloud.machine_state(&connection, record.uuid);
        let Ok(there) = self.unless_interrupted(record.uuid, asking).await else { return Ok(()) };
        let there = there.map_err(LifecycleError::backend("look after", &record.name))?;
        let before = record.cloud.take();
        let detail = match there {
            // It is as it is recorded.
            None if before.is_none() || record.state == MachineState::Lost => return Ok(()),
            Some(there) if there.is_off && record.state == MachineState::Stopped && before.is_some() => {
                return Ok(());
            }
            None => "somebody has deleted it in the cloud; it is off".to_owned(),
            Some(there) if there.is_off => {
                record.state = MachineState::Stopped;
                record.wanted = Wanted::Stopped;
                record.cloud = Some(there.machine);
                switched_off(&record.name)
            }
            Some(there) => {
                record.state = MachineState::Running;
                record.wanted = Wanted::Running;
                record.cloud = Some(there.machine);
                "it is on in the cloud, though it was recorded as off or lost".to_owned()
            }
        };
        record.reason = Some(detail.clone());
        self.save(&record, &Caller::daemon(), "state", detail).await
    }
}

/// Why a machine is off that costs.
fn switched_off(machine: &str) -> String {
    format!(
        "somebody has switched it off in the cloud, where it still costs; 'headwater machine stop {machine}' deletes it there"
    )
}

/// `IMAGE@NUMBER`.
fn name_of(version: &ImageVersion) -> String {
    format!("{}@{}", version.image, version.number)
}

/// The size of the OS disk of a machine in a cloud.
pub(crate) fn os_disk_bytes(wanted: Option<u64>, version: &ImageVersion) -> u64 {
    wanted.unwrap_or_else(|| version.size_bytes.div_ceil(GIB).max(1).saturating_mul(GIB))
}

/// Whether the same may succeed later, so that what was begun stays.
fn is_passing(error: &LifecycleError) -> bool {
    matches!(error.kind(), ProblemKind::Unavailable) || error.is_of_database()
}

//! What all operations share.

use std::collections::{HashMap, HashSet};
use std::future::Future;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use headwater_api::Alarm;
use headwater_db::{Database, NewEvent};
use tokio::sync::{OwnedMutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard, Semaphore, watch};
use tokio::time::Instant;
use uuid::Uuid;

use crate::advice::AdviceState;
use crate::alarms::AlarmState;
use crate::backend::{Clock, Cloud, Disks, Hypervisor, IdentityProvider, Images, Random, Wake};
use crate::caller::Caller;
use crate::claims::ClaimsState;
use crate::damage::Damage;
use crate::fleet::{FleetState, OwnHost};
use crate::lifecycle::Active;
use crate::lifecycle::disk_readers::MAX_NOTES;
use crate::lifecycle::pending_events::PendingEvents;
use crate::lifecycle::store_waits::ForcedStops;
use crate::retention::RetentionState;
use crate::store_view_cache::StoreViews;
use crate::tasks::{MAX_TASKS, Tasks};
use crate::web::WebState;

/// How often wanted and actual state are compared although nothing has changed here.
const COMPARE_ALL_MS: u64 = 60_000;

/// What a service is made of.
pub struct Parts {
    /// What it remembers.
    pub db: Arc<dyn Database>,
    /// The store of images.
    pub images: Arc<dyn Images>,
    /// Machines' disks.
    pub disks: Arc<dyn Disks>,
    /// What runs machines.
    pub hypervisor: Arc<dyn Hypervisor>,
    /// The time.
    pub clock: Arc<dyn Clock>,
    /// Randomness for identities.
    pub random: Arc<dyn Random>,
    /// The data directory.
    pub data_dir: PathBuf,
    /// The host.
    pub host: OwnHost,
}

/// The control plane of one host. Cloning is cheap; all clones are one service.
#[derive(Clone)]
pub struct Service(Arc<Inner>);

struct Inner {
    parts: Parts,
    started_at_ms: u64,
    active: Mutex<HashMap<Uuid, Arc<Active>>>,
    locks: Mutex<HashMap<Uuid, Arc<tokio::sync::Mutex<()>>>>,
    /// Persistent disks that a version is being made of, and machines whose disk is not kept.
    sealing: Mutex<HashSet<Uuid>>,
    /// Machines whose guests restarted and that are not on again, each with whose work that is, and why it failed so far.
    restarting: Mutex<HashMap<Uuid, Arc<Mutex<Option<Alarm>>>>>,
    /// Shared by who is about to use a version, alone with who removes one.
    versions: RwLock<()>,
    stopping: Arc<AtomicBool>,
    /// Since when.
    stop_begun: watch::Sender<Option<Instant>>,
    forced: ForcedStops,
    task_slots: Arc<Semaphore>,
    /// Long operations that wait for one of them.
    tasks_queued: Arc<AtomicU64>,
    /// Of notes that are being written.
    note_places: Arc<Semaphore>,
    /// Operations that are run to their end.
    under_way: watch::Sender<usize>,
    answers: StoreViews,
    damage: Damage,
    alarms: AlarmState,
    advice: AdviceState,
    pending_events: PendingEvents,
    holds: RetentionState,
    tasks: Tasks,
    web: WebState,
    claims: ClaimsState,
    /// What the last comparison of wanted and actual state saw, if all was well.
    compared: Mutex<Option<Seen>>,
    fleet: FleetState,
    /// Switches on machines that are not virtual. Empty: nothing can do that.
    waker: OnceLock<Arc<dyn Wake>>,
    /// The identity provider of people who log in. Empty: people cannot log in.
    people: OnceLock<Arc<dyn IdentityProvider>>,
    /// The clouds. Empty: connections cannot be used.
    clouds: OnceLock<Arc<dyn Cloud>>,
}

/// All that a comparison of wanted and actual state depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Seen {
    /// Of the database.
    revision: u64,
    /// Of what is in memory.
    fingerprint: u64,
    /// Every so often another program's changes are looked for.
    period: u64,
}

/// A look at what a comparison of wanted and actual state depends on.
pub(crate) struct Look(Seen);

/// A long operation that waits for its turn.
pub(crate) struct Queued(Arc<AtomicU64>);

impl Drop for Queued {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Service {
    /// A service over its parts. Call [`Service::recover`] before it serves anyone.
    pub fn new(parts: Parts) -> Self {
        let started_at_ms = parts.clock.now_ms();
        Self(Arc::new(Inner {
            parts,
            started_at_ms,
            active: Mutex::default(),
            locks: Mutex::default(),
            sealing: Mutex::default(),
            restarting: Mutex::default(),
            versions: RwLock::default(),
            stopping: Arc::default(),
            stop_begun: watch::Sender::new(None),
            forced: ForcedStops::default(),
            task_slots: Arc::new(Semaphore::new(MAX_TASKS)),
            tasks_queued: Arc::default(),
            note_places: Arc::new(Semaphore::new(MAX_NOTES)),
            under_way: watch::Sender::new(0),
            answers: StoreViews::default(),
            damage: Damage::default(),
            alarms: AlarmState::default(),
            advice: AdviceState::default(),
            pending_events: PendingEvents::default(),
            holds: RetentionState::default(),
            tasks: Tasks::default(),
            web: WebState::default(),
            claims: ClaimsState::default(),
            compared: Mutex::default(),
            fleet: FleetState::default(),
            waker: OnceLock::new(),
            people: OnceLock::new(),
            clouds: OnceLock::new(),
        }))
    }

    /// Looks whether anything has changed since the last comparison at which all was well. The database is not read.
    pub(crate) fn look_for_changes(&self) -> Option<Look> {
        let seen = Seen {
            revision: self.db().revision(),
            fingerprint: self.fingerprint(),
            period: self.0.parts.clock.now_ms() / COMPARE_ALL_MS,
        };
        let compared = *self.0.compared.lock().unwrap_or_else(PoisonError::into_inner);
        (compared != Some(seen)).then_some(Look(seen))
    }

    /// Notes that all was well at that look, or not.
    pub(crate) fn has_compared(&self, Look(seen): Look, is_well: bool) {
        *self.0.compared.lock().unwrap_or_else(PoisonError::into_inner) = is_well.then_some(seen);
    }

    /// A number that is another one if other machines are on or to be started again, or have come further with their start.
    fn fingerprint(&self) -> u64 {
        let hash = |of: &dyn Fn(&mut DefaultHasher)| {
            let mut hasher = DefaultHasher::new();
            of(&mut hasher);
            hasher.finish()
        };
        let mut sum = 0_u64;
        for (uuid, active) in self.active_map().iter() {
            let is_up = active.boot_time().is_some();
            let place = Arc::as_ptr(active).addr();
            sum = sum.wrapping_add(hash(&|hasher| (uuid, place, is_up).hash(hasher)));
        }
        for uuid in self.restarts().keys() {
            sum = sum.wrapping_add(hash(&|hasher| (uuid, "restarts").hash(hasher)));
        }
        sum
    }

    pub(crate) fn db(&self) -> &dyn Database {
        &*self.0.parts.db
    }

    pub(crate) fn images(&self) -> &Arc<dyn Images> {
        &self.0.parts.images
    }

    pub(crate) fn disks(&self) -> &dyn Disks {
        &*self.0.parts.disks
    }

    pub(crate) fn hypervisor(&self) -> &dyn Hypervisor {
        &*self.0.parts.hypervisor
    }

    pub(crate) fn random(&self) -> &dyn Random {
        &*self.0.parts.random
    }

    pub(crate) fn now_ms(&self) -> u64 {
        self.0.parts.clock.now_ms()
    }

    pub(crate) fn since_boot_ms(&self) -> u64 {
        self.0.parts.clock.since_boot_ms()
    }

    pub(crate) fn started_at_ms(&self) -> u64 {
        self.0.started_at_ms
    }

    /// The data directory.
    pub fn data_dir(&self) -> &Path {
        &self.0.parts.data_dir
    }

    /// The directory of all machines' sockets, logs and seed disks.
    pub fn run_root(&self) -> PathBuf {
        self.data_dir().join("run")
    }

    /// One machine's directory.
    pub fn run_dir(&self, machine: &str) -> PathBuf {
        self.run_root().join(machine)
    }

    /// Set when the daemon stops: long operations give up.
    pub(crate) fn stopping_flag(&self) -> Arc<AtomicBool> {
        self.0.stopping.clone()
    }

    pub(crate) fn is_stopping(&self) -> bool {
        self.0.stopping.load(Ordering::SeqCst)
    }

    pub(crate) fn task_slots(&self) -> Arc<Semaphore> {
        self.0.task_slots.clone()
    }

    /// Counts a long operation among those that wait, until what this returns is dropped.
    pub(crate) fn queue_task(&self) -> Queued {
        self.0.tasks_queued.fetch_add(1, Ordering::Relaxed);
        Queued(Arc::clone(&self.0.tasks_queued))
    }

    /// How many long operations run, and how many wait for them.
    pub(crate) fn task_counts(&self) -> (u64, u64) {
        let running = MAX_TASKS.saturating_sub(self.0.task_slots.available_permits());
        (u64::try_from(running).unwrap_or(u64::MAX), self.0.tasks_queued.load(Ordering::Relaxed))
    }

    pub(crate) fn note_places(&self) -> Arc<Semaphore> {
        self.0.note_places.clone()
    }

    pub(crate) fn forced(&self) -> &ForcedStops {
        &self.0.forced
    }

    pub(crate) fn hold_state(&self) -> &RetentionState {
        &self.0.holds
    }

    pub(crate) fn tasks(&self) -> &Tasks {
        &self.0.tasks
    }

    pub(crate) fn claims_state(&self) -> &ClaimsState {
        &self.0.claims
    }

    /// Sets the identity provider of people who log in, once.
    pub fn logs_in_with(&self, provider: Option<Arc<dyn IdentityProvider>>) {
        if let Some(provider) = provider {
            // A second call changes nothing.
            let _ = self.0.people.set(provider);
        }
    }

    pub(crate) fn people(&self) -> Option<&Arc<dyn IdentityProvider>> {
        self.0.people.get()
    }

    /// Sets the clouds, once.
    pub fn connects_with(&self, clouds: Arc<dyn Cloud>) {
        // A second call changes nothing.
        let _ = self.0.clouds.set(clouds);
    }

    pub(crate) fn clouds(&self) -> Option<&Arc<dyn Cloud>> {
        self.0.clouds.get()
    }

    /// Machines that boot from the network are switched on by this.
    pub fn wakes_with(&self, waker: Option<Arc<dyn Wake>>) {
        if let Some(waker) = waker {
            // It is said once, at the start.
            let _ = self.0.waker.set(waker);
        }
    }

    pub(crate) fn waker(&self) -> Option<&Arc<dyn Wake>> {
        self.0.waker.get()
    }

    pub(crate) fn fleet(&self) -> &FleetState {
        &self.0.fleet
    }

    pub(crate) fn host_parts(&self) -> &OwnHost {
        &self.0.parts.host
    }

    pub(crate) fn web(&self) -> &WebState {
        &self.0.web
    }

    pub(crate) fn answers(&self) -> &StoreViews {
        &self.0.answers
    }

    pub(crate) fn damage(&self) -> &Damage {
        &self.0.damage
    }

    pub(crate) fn advice_state(&self) -> &AdviceState {
        &self.0.advice
    }

    pub(crate) fn alarm_state(&self) -> &AlarmState {
        &self.0.alarms
    }

    pub(crate) fn pending_events(&self) -> &PendingEvents {
        &self.0.pending_events
    }

    /// Refuses new starts and cancels long operations, which then clean up after themselves.
    pub fn begin_stop(&self) {
        self.0.stopping.store(true, Ordering::SeqCst);
        self.0.stop_begun.send_modify(|since| {
            since.get_or_insert_with(Instant::now);
        });
    }

    /// Waits until the daemon has been stopping for so long.
    pub(crate) async fn stopping_for(&self, time: Duration) {
        let mut begun = self.0.stop_begun.subscribe();
        let since = begun.wait_for(Option::is_some).await.ok().and_then(|since| *since);
        match since {
            Some(since) => tokio::time::sleep_until(since + time).await,
            // The sender is there for as long as we are.
            None => std::future::pending().await,
        }
    }

    /// Waits until all long operations ended, at most `limit`. Returns whether they did.
    pub async fn tasks_ended(&self, limit: Duration) -> bool {
        let all = u32::try_from(MAX_TASKS).unwrap_or(u32::MAX);
        tokio::time::timeout(limit, self.0.task_slots.acquire_many(all)).await.is_ok()
    }

    /// Waits until what goes on after its client hung up, or without one, has ended, at most `limit`. Returns whether it did.
    pub async fn operations_ended(&self, limit: Duration) -> bool {
        let mut under_way = self.0.under_way.subscribe();
        tokio::time::timeout(limit, under_way.wait_for(|count| *count == 0)).await.is_ok()
    }

    pub(crate) fn active_map(&self) -> MutexGuard<'_, HashMap<Uuid, Arc<Active>>> {
        // The map is whole between any two statements, so a panic elsewhere does not spoil it.
        self.0.active.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn active(&self, uuid: Uuid) -> Option<Arc<Active>> {
        self.active_map().get(&uuid).cloned()
    }

    /// Waits for the machine's turn. Changes of one machine's state are made only by who holds this.
    pub(crate) async fn lock(&self, uuid: Uuid) -> OwnedMutexGuard<()> {
        self.machine_lock(uuid).lock_owned().await
    }

    /// The same, where nobody else has it.
    pub(crate) fn try_lock(&self, uuid: Uuid) -> Option<OwnedMutexGuard<()>> {
        self.machine_lock(uuid).try_lock_owned().ok()
    }

    /// How many have the machine's turn, or wait for it.
    #[cfg(test)]
    pub(crate) fn at_turn(&self, uuid: Uuid) -> usize {
        // The map has one of its own.
        let locks = self.0.locks.lock().unwrap_or_else(PoisonError::into_inner);
        locks.get(&uuid).map_or(0, |lock| Arc::strong_count(lock) - 1)
    }

    fn machine_lock(&self, uuid: Uuid) -> Arc<tokio::sync::Mutex<()>> {
        self.0.locks.lock().unwrap_or_else(PoisonError::into_inner).entry(uuid).or_default().clone()
    }

    /// Notes that a version is being made of a persistent disk, or of that of a machine whose disk is not kept, until the guard is dropped;
    /// `None` where one is.
    pub(crate) fn begin_sealing(&self, disk: Uuid) -> Option<SealGuard> {
        let begun = self.sealing_set().insert(disk);
        begun.then(|| SealGuard { service: self.clone(), disk })
    }

    /// Whether a version is being made of a persistent disk: then nobody opens or discards it.
    pub(crate) fn is_sealing(&self, disk: Uuid) -> bool {
        self.sealing_set().contains(&disk)
    }

    fn sealing_set(&self) -> MutexGuard<'_, HashSet<Uuid>> {
        self.0.sealing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that a machine is off only until it is started again, whatever the database says, until the guard is dropped or
    /// the machine is on.
    pub(crate) fn begin_restart(&self, machine: Uuid) -> Restart {
        let whose = Arc::default();
        self.restarts().insert(machine, Arc::clone(&whose));
        Restart { service: self.clone(), machine, whose }
    }

    /// Whether that is so.
    pub(crate) fn is_restarting(&self, machine: Uuid) -> bool {
        self.restarts().contains_key(&machine)
    }

    /// Notes what keeps a machine off that is to be started again. It began with the first failure.
    pub(crate) fn restart_failed(&self, machine: Uuid, mut alarm: Alarm) {
        let Some(restart) = self.restarts().get(&machine).cloned() else { return };
        let mut noted = restart.lock().unwrap_or_else(PoisonError::into_inner);
        alarm.since_ms = noted.as_ref().map_or(alarm.since_ms, |noted| noted.since_ms);
        *noted = Some(alarm);
    }

    /// What keeps it off.
    pub(crate) fn failing_restart(&self, machine: Uuid) -> Option<Alarm> {
        let restart = self.restarts().get(&machine).cloned()?;
        let noted = restart.lock().unwrap_or_else(PoisonError::into_inner);
        noted.clone()
    }

    /// The machines of which something keeps them off.
    pub(crate) fn failing_restarts(&self) -> Vec<Uuid> {
        let fails =
            |restart: &Mutex<Option<Alarm>>| restart.lock().unwrap_or_else(PoisonError::into_inner).is_some();
        self.restarts().iter().filter(|(_, restart)| fails(restart)).map(|(uuid, _)| *uuid).collect()
    }

    /// A machine is on.
    pub(crate) fn is_on_now(&self, machine: Uuid, active: Arc<Active>) {
        self.active_map().insert(machine, active);
        self.restarts().remove(&machine);
    }

    fn restarts(&self) -> MutexGuard<'_, HashMap<Uuid, Arc<Mutex<Option<Alarm>>>>> {
        self.0.restarting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps versions from being removed: held from before a version is looked up until the database says who uses it. It
    /// comes after a machine's turn and before a write transaction. There is one of those at a time in the whole daemon, and
    /// so none is held while a store is asked, which may take minutes to answer.
    pub(crate) async fn using_versions(&self) -> RwLockReadGuard<'_, ()> {
        self.0.versions.read().await
    }

    /// Keeps others from beginning to use a version: held from before it is looked up who does until it is gone.
    pub(crate) async fn removing_versions(&self) -> RwLockWriteGuard<'_, ()> {
        self.0.versions.write().await
    }

    pub(crate) fn forget_lock(&self, uuid: Uuid) {
        self.0.locks.lock().unwrap_or_else(PoisonError::into_inner).remove(&uuid);
    }

    pub(crate) fn event(
        &self,
        caller: &Caller,
        subject: String,
        action: &'static str,
        detail: impl Into<String>,
    ) -> NewEvent {
        NewEvent {
            at_ms: self.now_ms(),
            caller: caller.principal.clone(),
            subject,
            action: action.into(),
            detail: detail.into(),
            change: None,
        }
    }

    /// Writes an event of its own to the history.
    pub(crate) async fn append(&self, event: NewEvent) -> Result<(), headwater_db::DbError> {
        let mut repo = self.db().write().await?;
        repo.events().append(event).await?;
        repo.save().await
    }

    /// Counts an operation until what this gives is dropped: [`Service::operations_ended`] waits for it.
    pub(crate) fn begin_operation(&self) -> RunningOperation {
        self.0.under_way.send_modify(|count| *count += 1);
        RunningOperation(self.clone())
    }

    /// Runs an operation to its end even where the client that asked for it hangs up.
    pub(crate) async fn to_the_end<T, E>(
        &self,
        work: impl Future<Output = Result<T, E>> + Send + 'static,
    ) -> Result<T, E>
    where
        T: Send + 'static,
        E: Send + 'static,
    {
        let under_way = self.begin_operation();
        let work = async move {
            let _under_way = under_way;
            work.await
        };
        match tokio::spawn(work).await {
            Ok(outcome) => outcome,
            Err(e) => match e.try_into_panic() {
                Ok(panic) => std::panic::resume_unwind(panic),
                // The runtime is going down, and this task with it.
                Err(_) => std::future::pending().await,
            },
        }
    }
}

/// See [`Service::begin_operation`].
pub(crate) struct RunningOperation(Service);

impl Drop for RunningOperation {
    fn drop(&mut self) {
        self.0.0.under_way.send_modify(|count| *count -= 1);
    }
}

/// See [`Service::begin_sealing`].
pub(crate) struct SealGuard {
    service: Service,
    disk: Uuid,
}

impl Drop for SealGuard {
    fn drop(&mut self) {
        self.service.sealing_set().remove(&self.disk);
    }
}

/// See [`Service::begin_restart`].
pub(crate) struct Restart {
    service: Service,
    machine: Uuid,
    whose: Arc<Mutex<Option<Alarm>>>,
}

impl Drop for Restart {
    fn drop(&mut self) {
        let mut restarts = self.service.restarts();
        // It may have been on meanwhile, and be restarting again.
        if restarts.get(&self.machine).is_some_and(|whose| Arc::ptr_eq(whose, &self.whose)) {
            restarts.remove(&self.machine);
        }
    }
}

impl std::fmt::Debug for Service {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Service").field("data_dir", &self.0.parts.data_dir).finish_non_exhaustive()
    }
}

//! Lives that go wrong, with backends that the tests steer.

mod claims;
mod clouds;
mod creation;
mod damage;
mod database;
mod done;
mod endings;
mod failover;
mod firmware;
mod generalise;
mod keys;
mod maintenance;
mod nodes;
mod notes;
mod one_image;
mod personality;
mod promotions;
mod pulls;
mod removals;
mod rolls;
mod schemes;
mod seals;
mod slow_store;
mod targets;

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use headwater_api::metrics::Sample;
use headwater_api::name::ImageRef;
use headwater_api::platform::Platform;
use headwater_api::{
    BootTrace, CacheMode, CacheSettings, Channel, DiffReport, DiskCounters, ExportFormat, HostRam, Image,
    ImageVersion, MachineState, ProblemKind, Removed, TracePlace, VerifyReport, VerifyRequest, Wanted,
};
use headwater_db::sqlite::SqliteDatabase;
use headwater_db::{Database, DbError, MachineRecord, Repository, SECRETS_KEY_BYTES, Secrets, SecretsKey};
use tokio::sync::{Notify, mpsc, watch};
use uuid::Uuid;

use crate::backend::{
    BackendError, Clock, Disk, DiskRequest, Disks, ExecOutput, FrozenDisk, Given, Hypervisor, IdentityLeft,
    Images, ImportOrder, ImportOutcome, Listed, PersistentDiskRef, PersistentDiskRequest, Promoted,
    Promotion, PullOrder, PullOutcome, Pulled, RetentionRoot, SealOrder, SealOutcome, Shortage, SystemClock,
    SystemRandom, TaskControl, Vm, VmExit, VmPlan, VmRequest,
};
use crate::caller::Caller;
use crate::fleet::OwnHost;
use crate::lifecycle::LifecycleError;
use crate::{Parts, Service};
use database::FragileDatabase;
use one_image::OneImage;

fn unused<T>() -> Result<T, BackendError> {
    Err(BackendError::new(ProblemKind::Failed, "not in this test"))
}

/// A version of the one image.
fn version(number: u64, source: &str) -> ImageVersion {
    ImageVersion {
        image: "image".to_owned(),
        number,
        hash: format!("{number:064}"),
        size_bytes: 4096,
        stored_bytes: 0,
        created_at_ms: 0,
        source: source.to_owned(),
        note: String::new(),
        author: String::new(),
        retired: false,
        keeps_identity: false,
        channels: Vec::new(),
    }
}

fn trace(version: &ImageVersion) -> BootTrace {
    let (version, place) = (version.clone(), TracePlace::Store);
    let (boots, chunks, image_bytes, stored_bytes) = (1, 1, 1, 1);
    BootTrace { version, boots, boots_wanted: 3, chunks, image_bytes, stored_bytes, lasts_ms: 1, place }
}

/// Disks and VMs that only remember what became of them.
#[derive(Default)]
struct Host {
    versions: Mutex<Vec<ImageVersion>>,
    /// Promotions to come.
    scheduled: Mutex<Vec<Promotion>>,
    production: Mutex<Option<u64>>,
    /// The store makes changes, and its answers are lost.
    answers_lost: AtomicBool,
    /// What the clock says; 0: the time.
    now_ms: AtomicU64,
    /// The persistent disk, version and mode of each disk that was opened.
    opened: Mutex<Vec<(Option<Uuid>, u64, CacheMode)>>,
    /// The limits that disks were given.
    limits: Mutex<Vec<CacheSettings>>,
    discarded: Mutex<Vec<Uuid>>,
    kept_by_sweep: Mutex<Vec<Uuid>>,
    /// The keys of persistent disks.
    keys: Mutex<Vec<PathBuf>>,
    /// What was done to guests' file systems and to disks, in order.
    freezes: Mutex<Vec<&'static str>>,
    /// Whoever waits for this hangs up while a guest freezes.
    cancelled_by_freeze: Mutex<Option<Arc<TaskControl>>>,
    seals: Mutex<Vec<SealOrder>>,
    /// No agent answers.
    no_agent: AtomicBool,
    /// A start fails.
    start_fails: AtomicBool,
    /// It cannot run the machines that it is asked about.
    checks_fail: AtomicBool,
    /// A seal waits while this is set, then fails where it was cancelled.
    seals_wait: AtomicBool,
    seal_waits: Notify,
    seal_goes_on: Notify,
    /// The image's list of versions is damaged.
    damaged: AtomicBool,
    /// Its versions are found whole; else a chunk of each is damaged.
    is_whole: AtomicBool,
    /// The store says that it has no such image.
    image_hides: AtomicBool,
    /// The reference of which it says that there is none.
    hidden: Mutex<Option<String>>,
    /// The reference that the store cannot be asked for.
    unreadable: Mutex<Option<String>>,
    /// The reference that the store takes its time for, once.
    hangs_on: Mutex<Option<String>>,
    /// The store does not answer while this is set.
    away: AtomicBool,
    back: Notify,
    resolve_waits: Notify,
    resolve_goes_on: Notify,
    /// References that were asked for.
    resolved: Mutex<Vec<String>>,
    /// Nothing can be changed in the store.
    is_read_only: AtomicBool,
    /// What was to come from other stores. A pull has brought a version, which is told, and waits while `pulls_wait` is set, or until
    /// it is cancelled.
    pulls: Mutex<Vec<PullOrder>>,
    pulls_wait: AtomicBool,
    /// Other daemons use the store, too.
    is_shared: AtomicBool,
    /// What it was told that is needed.
    holds: Mutex<Vec<RetentionRoot>>,
    /// How often it was told.
    holds_asked: AtomicU64,
    /// It cannot be told anything.
    holds_fail: AtomicBool,
    /// Nor while another daemon removes from it.
    removed_from: AtomicBool,
    /// It takes its time to be told while this is set.
    holds_wait: AtomicBool,
    hold_waits: Notify,
    hold_goes_on: Notify,
    /// A removal, or a change of a boot trace or a note, waits while this is set.
    removals_wait: AtomicBool,
    removal_waits: Notify,
    removal_goes_on: Notify,
    /// A removal fails when it is done.
    removals_fail: AtomicBool,
    /// A promotion is due, and waits, while this is set.
    promotions_wait: AtomicBool,
    promotion_waits: Notify,
    promotion_goes_on: Notify,
    open_disks: Mutex<usize>,
    /// Disks have no room for writes.
    disks_full: AtomicBool,
    relieved: AtomicBool,
    /// Somebody reads them from outside.
    disks_read: AtomicBool,
    /// Closing a disk does not save its last writes.
    closes_fail: AtomicBool,
    vms: Mutex<Vec<Arc<FakeVm>>>,
    /// How machines were stopped: by their power button, or at once.
    stops: Mutex<Vec<&'static str>>,
    /// What is found on disks of what makes their machines themselves.
    identity_left: Mutex<IdentityLeft>,
    /// Disks cannot be looked into.
    looks_fail: AtomicBool,
    /// Guests do not hear their power buttons.
    deaf: AtomicBool,
    button_pressed: Notify,
    /// A disk's removal waits while this is set.
    discards_wait: AtomicBool,
    discard_waits: Notify,
    discard_goes_on: Notify,
    /// By how much somebody has set the clock.
    clock_set_ms: AtomicI64,
    /// Guests are up.
    boots: watch::Sender<bool>,
    no_boot: watch::Sender<Option<String>>,
    /// A command in a guest does not end while this is set, and to write out goes on when it is told to.
    execs_hang: AtomicBool,
    exec_hangs: Notify,
    exec_goes_on: Notify,
    /// What commands in guests read, how they end, and the addresses of all guests.
    exec_inputs: Mutex<Vec<String>>,
    exec_code: AtomicI32,
    addresses: Mutex<Vec<std::net::IpAddr>>,
    /// The personality strings with which machines were started.
    personalities: Mutex<Vec<BTreeMap<String, String>>>,
    /// How many users are logged in to a machine.
    users: Mutex<HashMap<String, usize>>,
    /// A start waits while this is set.
    starts_wait: AtomicBool,
    start_waits: Notify,
    go_on: Notify,
}

/// Tells the time that a test sets.
struct SetClock(Arc<Host>);

impl Clock for SetClock {
    fn now_ms(&self) -> u64 {
        let ms = match self.0.now_ms.load(Ordering::SeqCst) {
            0 => SystemClock.now_ms(),
            set_ms => set_ms,
        };
        ms.saturating_add_signed(self.0.clock_set_ms.load(Ordering::SeqCst))
    }

    fn since_boot_ms(&self) -> u64 {
        SystemClock.since_boot_ms()
    }
}

impl Host {
    /// Takes its time, where it is to.
    async fn change_of_the_store(&self) {
        if self.removals_wait.load(Ordering::SeqCst) {
            self.removal_waits.notify_one();
            self.removal_goes_on.notified().await;
        }
    }

    /// Waits for the store.
    async fn answers(&self) {
        let back = self.back.notified();
        if self.away.load(Ordering::SeqCst) {
            back.await;
        }
    }
}

/// How long a guest takes to freeze its file systems.
const FREEZING: Duration = Duration::from_millis(20);

struct FakeDisk(Arc<Host>, AtomicBool);

#[async_trait]
impl Disk for FakeDisk {
    fn socket(&self) -> &Path {
        Path::new("/disk.sock")
    }
    fn counters(&self) -> DiskCounters {
        DiskCounters::default()
    }
    fn has_booted(&self) {}
    fn metrics(&self) -> Vec<Sample> {
        Vec::new()
    }
    fn check_limits(&self, _: &CacheSettings) -> Result<(), BackendError> {
        Ok(())
    }
    fn set_limits(&self, cache: &CacheSettings) {
        self.0.limits.lock().unwrap().push(*cache);
    }
    fn can_freeze(&self) -> Result<(), BackendError> {
        let read = BackendError::new(ProblemKind::Conflict, "its disk is being read");
        let is_read = self.0.disks_read.load(Ordering::SeqCst);
        if is_read { Err(read.advise("try again when that is done")) } else { Ok(()) }
    }
    fn freeze(&self) -> Result<Box<dyn FrozenDisk>, BackendError> {
        self.can_freeze()?;
        self.0.freezes.lock().unwrap().push("disk");
        Ok(Box::new(FakeFrozen(self.0.clone())))
    }
    fn shortage(&self) -> Option<Shortage> {
        let full = || Shortage { message: "its disk is full".to_owned(), advice: "more".to_owned() };
        self.0.disks_full.load(Ordering::SeqCst).then(full)
    }
    fn relieve(&self) {
        self.0.relieved.store(true, Ordering::SeqCst);
    }
    async fn close(&self) -> Result<(), BackendError> {
        if self.1.swap(true, Ordering::SeqCst) {
            return Ok(());
        }
        *self.0.open_disks.lock().unwrap() -= 1;
        match self.0.closes_fail.load(Ordering::SeqCst) {
            true => Err(BackendError::new(ProblemKind::NoSpace, "the machine's last writes are lost")),
            false => Ok(()),
        }
    }
}

/// Its version is the next one.
struct FakeFrozen(Arc<Host>);

#[async_trait]
impl FrozenDisk for FakeFrozen {
    async fn identity_left(&self, given: Given, _: Arc<TaskControl>) -> Result<IdentityLeft, BackendError> {
        assert!(given.ssh_host_key_private.reveal().contains("PRIVATE KEY") && !given.machine_id.is_empty());
        if self.0.looks_fail.load(Ordering::SeqCst) {
            return Err(BackendError::new(ProblemKind::Failed, "cannot read the table of partitions"));
        }
        Ok(self.0.identity_left.lock().unwrap().clone())
    }
    async fn seal(
        self: Box<Self>,
        order: SealOrder,
        control: Arc<TaskControl>,
    ) -> Result<SealOutcome, BackendError> {
        if self.0.seals_wait.load(Ordering::SeqCst) {
            self.0.seal_waits.notify_one();
            self.0.seal_goes_on.notified().await;
        }
        if control.is_cancelled() {
            return Err(BackendError::new(ProblemKind::Cancelled, "cancelled"));
        }
        let mut versions = self.0.versions.lock().unwrap();
        let newest = versions.iter().rev().find(|version| !version.retired);
        if order.newest_at_most.is_some_and(|most| newest.is_some_and(|newest| newest.number > most)) {
            return Err(BackendError::new(ProblemKind::Conflict, "there is a newer one"));
        }
        let mut set = self.0.production.lock().unwrap();
        let production = if set.is_none() { newest.map(|newest| newest.number) } else { None };
        *set = set.or(production);
        let version = version(versions.len() as u64 + 1, &order.source);
        let version = ImageVersion { keeps_identity: order.keeps_identity, ..version };
        versions.push(version.clone());
        self.0.seals.lock().unwrap().push(order);
        self.0.answer()?;
        Ok(SealOutcome { version, changed_bytes: 4096, production })
    }
}

struct FakeDisks(Arc<Host>);

#[async_trait]
impl Disks for FakeDisks {
    async fn check(&self, _: &CacheSettings) -> Result<(), BackendError> {
        Ok(())
    }
    async fn check_change(&self, _: &CacheSettings, _: &CacheSettings) -> Result<(), BackendError> {
        Ok(())
    }
    async fn check_space(
        &self,
        _: &CacheSettings,
        _: Option<PersistentDiskRef>,
        _: u64,
    ) -> Result<(), BackendError> {
        Ok(())
    }
    async fn open(&self, request: DiskRequest) -> Result<Arc<dyn Disk>, BackendError> {
        let opened = (request.kept.map(|kept| kept.id), request.version.number, request.cache.mode);
        self.0.opened.lock().unwrap().push(opened);
        *self.0.open_disks.lock().unwrap() += 1;
        Ok(Arc::new(FakeDisk(self.0.clone(), AtomicBool::new(false))))
    }
    fn metrics(&self) -> Vec<Sample> {
        Vec::new()
    }
    async fn open_persistent(
        &self,
        request: PersistentDiskRequest,
    ) -> Result<Box<dyn FrozenDisk>, BackendError> {
        assert!(request.cache.persistent && request.cache.mode != CacheMode::Ram, "{request:?}");
        Ok(Box::new(FakeFrozen(self.0.clone())))
    }
    async fn is_there(&self, id: Uuid) -> Result<bool, BackendError> {
        let was_opened = self.0.opened.lock().unwrap().iter().any(|it| it.0 == Some(id));
        Ok(was_opened && !self.0.discarded.lock().unwrap().contains(&id))
    }
    async fn discard(&self, id: Uuid) -> Result<(), BackendError> {
        if self.0.discards_wait.load(Ordering::SeqCst) {
            self.0.discard_waits.notify_one();
            self.0.discard_goes_on.notified().await;
        }
        self.0.discarded.lock().unwrap().push(id);
        Ok(())
    }
    fn host_ram(&self) -> HostRam {
        HostRam::default()
    }
    async fn persistent_keys(&self) -> Result<Vec<PathBuf>, BackendError> {
        Ok(self.0.keys.lock().unwrap().clone())
    }
    async fn sweep(&self, keep: &[Uuid]) -> Result<Vec<String>, BackendError> {
        *self.0.kept_by_sweep.lock().unwrap() = keep.to_vec();
        Ok(Vec::new())
    }
}

struct FakeVm(watch::Sender<Option<VmExit>>, Arc<Host>, String);

impl FakeVm {
    fn end(&self, exit: VmExit) {
        self.0.send_if_modified(|ended| {
            let first = ended.is_none();
            if first {
                *ended = Some(exit);
            }
            first
        });
    }
}

#[async_trait]
impl Vm for FakeVm {
    fn pid(&self) -> u32 {
        1
    }
    fn accelerator(&self) -> String {
        "none".to_owned()
    }
    fn is_out_of_space(&self) -> bool {
        false
    }
    async fn booted(&self) {
        self.1.boots.subscribe().wait_for(|up| *up).await.unwrap();
    }
    async fn found_nothing_to_boot(&self) -> String {
        self.1.no_boot.subscribe().wait_for(Option::is_some).await.unwrap().clone().unwrap()
    }
    async fn exited(&self) -> VmExit {
        let mut ended = self.0.subscribe();
        let exit = ended.wait_for(Option::is_some).await.unwrap();
        exit.clone().unwrap()
    }
    async fn stop(&self, grace: Duration) -> Result<VmExit, BackendError> {
        self.1.stops.lock().unwrap().push(if grace.is_zero() { "at once" } else { "ACPI" });
        if !grace.is_zero() && self.1.deaf.load(Ordering::SeqCst) {
            self.1.button_pressed.notify_one();
            return Ok(self.exited().await);
        }
        self.end(VmExit::PoweredOff);
        Ok(self.exited().await)
    }
    async fn kill(&self) -> Result<(), BackendError> {
        self.end(VmExit::Killed);
        Ok(())
    }
    async fn write_file_systems_out(&self) -> Result<(), BackendError> {
        if self.1.no_agent.load(Ordering::SeqCst) {
            return Err(BackendError::new(ProblemKind::Failed, "no agent answers"));
        }
        self.1.freezes.lock().unwrap().push("write out");
        if self.1.execs_hang.load(Ordering::SeqCst) {
            self.1.exec_hangs.notify_one();
            self.1.exec_goes_on.notified().await;
        }
        Ok(())
    }
    async fn freeze_file_systems(&self) -> Result<(), BackendError> {
        self.1.freezes.lock().unwrap().push("freeze");
        // The guest writes out what is dirty.
        tokio::time::sleep(FREEZING).await;
        if let Some(control) = &*self.1.cancelled_by_freeze.lock().unwrap() {
            control.cancel();
        }
        Ok(())
    }
    async fn thaw_file_systems(&self) -> Result<(), BackendError> {
        self.1.freezes.lock().unwrap().push("thaw");
        Ok(())
    }
    async fn generalise(&self, host_name: &str, also: &[String]) -> Result<Vec<String>, BackendError> {
        if self.1.no_agent.load(Ordering::SeqCst) {
            return Err(BackendError::new(ProblemKind::Failed, "no agent answers"));
        }
        self.1.freezes.lock().unwrap().push("generalise");
        self.1.identity_left.lock().unwrap().found.clear();
        Ok([vec![format!("all of {host_name}")], also.to_vec()].concat())
    }
    async fn screenshot(&self) -> Result<Vec<u8>, BackendError> {
        Ok(b"a PNG".to_vec())
    }
    async fn addresses(&self) -> Result<Vec<std::net::IpAddr>, BackendError> {
        Ok(self.1.addresses.lock().unwrap().clone())
    }
    async fn users(&self) -> Result<usize, BackendError> {
        if self.1.no_agent.load(Ordering::SeqCst) {
            return Err(BackendError::new(ProblemKind::Failed, "no agent answers"));
        }
        Ok(self.1.users.lock().unwrap().get(&self.2).copied().unwrap_or(0))
    }
    async fn exec(&self, _: &[String], input: Vec<u8>, _: Duration) -> Result<ExecOutput, BackendError> {
        if self.1.execs_hang.load(Ordering::SeqCst) {
            self.1.exec_hangs.notify_one();
            std::future::pending::<()>().await;
        }
        if input.is_empty() {
            return unused();
        }
        let input = String::from_utf8(input).unwrap();
        self.1.exec_inputs.lock().unwrap().push(input.clone());
        // As a guest that says what it read.
        let exit_code = self.1.exec_code.load(Ordering::SeqCst);
        Ok(ExecOutput { exit_code, stderr: input.into_bytes(), ..ExecOutput::default() })
    }
}

struct FakeHypervisor(Arc<Host>);

#[async_trait]
impl Hypervisor for FakeHypervisor {
    async fn describe(&self) -> Result<String, BackendError> {
        unused()
    }
    async fn check(&self, plan: VmPlan<'_>) -> Result<(), BackendError> {
        // A guest would not know what a template is.
        assert!(!plan.user_data.is_some_and(|text| text.starts_with("## template: headwater")));
        match self.0.checks_fail.load(Ordering::SeqCst) {
            true => Err(BackendError::new(ProblemKind::Invalid, "'swtpm' is not installed")),
            false => Ok(()),
        }
    }
    async fn start(&self, request: VmRequest) -> Result<Arc<dyn Vm>, BackendError> {
        for name in ["console.log", "console.log.old", "qemu.log", "seed.img", "qemu.pid"] {
            std::fs::write(request.run_dir.join(name), name).unwrap();
        }
        if self.0.start_fails.load(Ordering::SeqCst) {
            return unused();
        }
        if self.0.starts_wait.load(Ordering::SeqCst) {
            self.0.start_waits.notify_one();
            self.0.go_on.notified().await;
        }
        self.0.personalities.lock().unwrap().push(request.identity.personality);
        let vm = Arc::new(FakeVm(watch::Sender::new(None), self.0.clone(), request.name));
        self.0.vms.lock().unwrap().push(vm.clone());
        Ok(vm)
    }
    async fn sweep_orphans(&self, _: &Path, _: &[String]) -> Result<Vec<String>, BackendError> {
        Ok(Vec::new())
    }
    fn console_log(&self, run_dir: &Path) -> PathBuf {
        run_dir.join("console.log")
    }
    fn console_socket(&self, run_dir: &Path) -> PathBuf {
        run_dir.join("console.sock")
    }
    fn display_socket(&self, run_dir: &Path) -> PathBuf {
        run_dir.join("vnc.sock")
    }
}

/// The host of the service.
pub(crate) fn own_host() -> OwnHost {
    let (id, name) = (Uuid::from_u128(1), "own".to_owned());
    OwnHost { id, name, memory_bytes: 64 << 30, cpus: 8, owns_database: true }
}

pub(crate) struct Fixture {
    dir: tempfile::TempDir,
    db: Arc<FragileDatabase>,
    host: Arc<Host>,
    pub(crate) service: Service,
}

impl Fixture {
    /// Lets time pass on the clock of the service.
    pub(crate) fn pass_ms(&self, ms: u64) {
        self.host.now_ms.store(self.service.now_ms() + ms, Ordering::SeqCst);
    }

    /// A service with the machine `lab`.
    pub(crate) async fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let db = FragileDatabase::open(&dir.path().join("db")).await;
        let host = Arc::new(Host::default());
        host.versions.lock().unwrap().push(version(1, ""));
        let service = Self::service(db.clone(), &host, dir.path());
        let new = crate::identity::make(&SystemRandom, "lab", None).unwrap();
        let record = MachineRecord {
            uuid: new.uuid,
            name: "lab".to_owned(),
            host: own_host().id,
            connection: None,
            cloud: None,
            mac: new.mac,
            boot: headwater_api::BootFrom::Vm,
            image: "image".to_owned(),
            pin: None,
            catalog: None,
            catalog_pin: None,
            scheme: None,
            catalog_scheme: None,
            cache: CacheSettings::default(),
            transport: headwater_api::DiskTransport::default(),
            memory_bytes: 1 << 29,
            cpus: 1,
            platform: Platform::default(),
            identity: new.identity,
            ssh_host_key_private: new.ssh_host_key_private,
            wanted: Wanted::Stopped,
            state: MachineState::Created,
            reason: None,
            version: None,
            kept: None,
            boot_ms: None,
            started_at_ms: None,
            fenced: false,
            to_start: false,
            on_host_loss: headwater_api::OnHostLoss::Wait,
            created_at_ms: 0,
        };
        let mut repo = db.write().await.unwrap();
        repo.machines().add(&record).await.unwrap();
        repo.save().await.unwrap();
        Self { dir, db, host, service }
    }

    fn service(db: Arc<FragileDatabase>, host: &Arc<Host>, data_dir: &Path) -> Service {
        Self::service_on(own_host(), db, host, data_dir)
    }

    fn service_on(own: OwnHost, db: Arc<FragileDatabase>, host: &Arc<Host>, data_dir: &Path) -> Service {
        Service::new(Parts {
            db,
            images: Arc::new(OneImage(host.clone())),
            disks: Arc::new(FakeDisks(host.clone())),
            hypervisor: Arc::new(FakeHypervisor(host.clone())),
            clock: Arc::new(SetClock(host.clone())),
            random: Arc::new(SystemRandom),
            data_dir: data_dir.to_owned(),
            host: own,
        })
    }

    /// Another daemon of the same data directory.
    pub(crate) fn another_service(&self) -> Service {
        Self::service(self.db.clone(), &self.host, self.dir.path())
    }

    /// The history, with what waits to be written to it.
    pub(crate) async fn db_events(&self) -> Vec<headwater_api::Event> {
        self.service.write_pending_events().await.unwrap();
        self.events().await
    }

    /// A check finds the first version damaged.
    pub(crate) async fn damage_of_first_version(&self) {
        self.finds_damage(&version(1, "")).await;
    }

    async fn start(&self) -> Result<MachineRecord, LifecycleError> {
        self.service.start("lab", &Caller::daemon()).await
    }

    async fn record(&self) -> MachineRecord {
        self.service.record("lab").await.unwrap()
    }

    async fn events(&self) -> Vec<headwater_api::Event> {
        self.db.read().await.unwrap().events().newest(None, 10_000).await.unwrap()
    }

    fn open_disks(&self) -> usize {
        *self.host.open_disks.lock().unwrap()
    }

    fn vm(&self) -> Arc<FakeVm> {
        self.host.vms.lock().unwrap().last().unwrap().clone()
    }

    /// Has the guest, which has restarted before, restart until its machine is seen in a pause of so many seconds or more
    /// before its next start. A busy host misses a short one, or takes so long for a boot that it is not quick.
    async fn restarts_until_a_pause_of(&self, least_s: u64) -> MachineRecord {
        let noted = async || {
            let events = self.events().await;
            events.iter().filter(|event| event.detail.starts_with("the guest restarted")).count()
        };
        loop {
            until("its start is over", async || self.record().await.state == MachineState::Booting).await;
            let (restarts, starts) = (noted().await, self.host.vms.lock().unwrap().len());
            self.vm().end(VmExit::Rebooted);
            until("the restart is noted", async || noted().await > restarts).await;
            let record = self.record().await;
            let pause_s = record.reason.as_deref().map_or(0, pause_of);
            if record.state == MachineState::Stopped && pause_s >= least_s {
                assert_eq!(record.wanted, Wanted::Running);
                return record;
            }
            until("it has started again", async || self.host.vms.lock().unwrap().len() > starts).await;
        }
    }
}

/// The seconds that a machine waits, as its reason says.
fn pause_of(reason: &str) -> u64 {
    let seconds = reason.strip_prefix("the guest keeps restarting; the machine is restarted in ");
    seconds.and_then(|rest| rest.strip_suffix(" s")?.parse().ok()).unwrap_or_else(|| panic!("{reason}"))
}

/// Writes a figure to standard error, if somebody wants figures.
fn figure(what: &str, took: Duration) {
    use std::io::Write as _;

    if std::env::var_os("HEADWATER_FIGURES").is_some() {
        let _ = writeln!(std::io::stderr(), "{what}: {:.3} s", took.as_secs_f64());
    }
}

pub(crate) async fn until(what: &str, mut is_so: impl AsyncFnMut() -> bool) {
    for _ in 0..30_000 {
        if is_so().await {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("five minutes passed, and not yet: {what}");
}

#[tokio::test]
async fn a_machine_that_ends_while_the_database_fails_is_not_on_for_ever() {
    let fixture = Fixture::new().await;
    fixture.start().await.unwrap();
    assert_eq!((fixture.record().await.state, fixture.open_disks()), (MachineState::Booting, 1));
    fixture.db.fails.store(true, Ordering::SeqCst);
    fixture.vm().end(VmExit::PoweredOff);
    until("its disk is closed", async || fixture.open_disks() == 0).await;
    until("the database has failed", async || fixture.db.failures.load(Ordering::SeqCst) > 0).await;
    fixture.db.fails.store(false, Ordering::SeqCst);
    let reconciling = tokio::spawn({
        let service = fixture.service.clone();
        async move { service.keep_reconciling().await }
    });
    until("it is lost", async || fixture.record().await.state == MachineState::Lost).await;
    reconciling.abort();
    let reason = fixture.record().await.reason.unwrap();
    assert!(reason.contains("could not be recorded"), "{reason}");
    fixture.start().await.unwrap();
    assert_eq!((fixture.record().await.state, fixture.open_disks()), (MachineState::Booting, 1));
}

#[tokio::test]
async fn a_store_that_is_away_hides_no_machine_and_no_status() {
    let fixture = Fixture::new().await;
    let views = async || {
        let records = vec![fixture.record().await];
        // The store answers when this test lets it, which it does not before the views are there.
        tokio::time::timeout(Duration::from_secs(60), fixture.service.views(records)).await.unwrap().unwrap()
    };
    assert_eq!(views().await[0].next_version.as_deref(), Some("image@1"));
    fixture.host.away.store(true, Ordering::SeqCst);
    assert_eq!(views().await[0].next_version.as_deref(), Some("image@1"));
    let figures =
        tokio::time::timeout(Duration::from_secs(60), fixture.service.store_figures()).await.unwrap();
    assert_eq!((figures.images, figures.bytes, figures.outdated), (None, None, true));
    fixture.host.away.store(false, Ordering::SeqCst);
    fixture.host.back.notify_waiters();
    until("it is back", async || fixture.service.store_figures().await.images == Some(1)).await;
    fixture.host.versions.lock().unwrap().clear();
    until("it is gone", async || views().await[0].next_version.is_none()).await;
}

#[tokio::test]
async fn a_start_that_a_stop_of_the_daemon_overtakes_is_undone() {
    let fixture = Fixture::new().await;
    fixture.start().await.unwrap();
    // The guest restarts, which starts it again.
    fixture.host.starts_wait.store(true, Ordering::SeqCst);
    fixture.vm().end(VmExit::Rebooted);
    fixture.host.start_waits.notified().await;
    fixture.service.begin_stop();
    let stopping = tokio::spawn({
        let service = fixture.service.clone();
        async move { service.stop_all(false).await }
    });
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert!(!stopping.is_finished(), "the machine that is being started was not waited for");
    fixture.host.go_on.notify_one();
    stopping.await.unwrap();
    let record = fixture.record().await;
    // It is to be on all the same.
    assert_eq!((record.state, record.wanted), (MachineState::Stopped, Wanted::Running));
    assert!(record.reason.unwrap().contains("serve --resume"));
    assert_eq!(fixture.open_disks(), 0);
    assert!(fixture.vm().0.borrow().is_some(), "its VM was not ended");
    assert!(matches!(fixture.start().await, Err(LifecycleError::Stopping(_))));
}

#[tokio::test]
async fn it_is_known_when_all_vms_have_ended() {
    let fixture = Fixture::new().await;
    fixture.service.vms_ended().await;
    fixture.start().await.unwrap();
    let mut ended = Box::pin(fixture.service.vms_ended());
    assert!(at_once(ended.as_mut()).is_none(), "the machine is on");
    fixture.service.stop_all(true).await;
    ended.await;
}

/// The outcome of a future that is there at once.
fn at_once<F: Future>(future: std::pin::Pin<&mut F>) -> Option<F::Output> {
    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    match future.poll(&mut context) {
        std::task::Poll::Ready(outcome) => Some(outcome),
        std::task::Poll::Pending => None,
    }
}

#[tokio::test]
async fn a_guest_that_only_restarts_is_started_ever_later_and_can_be_stopped_meanwhile() {
    let fixture = Fixture::new().await;
    fixture.start().await.unwrap();
    let starts = || fixture.host.vms.lock().unwrap().len();
    // The first one waits for nothing.
    fixture.vm().end(VmExit::Rebooted);
    until("it has started again", async || starts() == 2).await;
    fixture.restarts_until_a_pause_of(1).await;
    fixture.restarts_until_a_pause_of(2).await;
    fixture.service.stop("lab", false, &Caller::daemon()).await.unwrap();
    let at_stop = starts();
    tokio::time::sleep(Duration::from_secs(3)).await;
    let record = fixture.record().await;
    assert_eq!((record.state, record.wanted, starts()), (MachineState::Stopped, Wanted::Stopped, at_stop));
    // Whoever starts it does not wait.
    fixture.start().await.unwrap();
    assert_eq!(starts(), at_stop + 1);
}

#[tokio::test]
async fn stopping_the_daemon_leaves_machines_alone_that_are_off() {
    let fixture = Fixture::new().await;
    fixture.start().await.unwrap();
    fixture.vm().end(VmExit::Crashed { reason: "it fell over".to_owned() });
    until("it is crashed", async || fixture.record().await.state == MachineState::Crashed).await;
    fixture.service.begin_stop();
    fixture.service.stop_all(false).await;
    let record = fixture.record().await;
    assert_eq!((record.state, record.wanted), (MachineState::Crashed, Wanted::Running));
}

#[tokio::test]
async fn the_logs_of_a_machine_stay_when_it_is_off_and_its_secrets_do_not() {
    let fixture = Fixture::new().await;
    fixture.start().await.unwrap();
    fixture.service.stop("lab", false, &Caller::daemon()).await.unwrap();
    let entries = std::fs::read_dir(fixture.dir.path().join("run/lab")).unwrap();
    let mut left: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    left.sort();
    assert_eq!(left, ["console.log", "console.log.old", "qemu.log"]);
}

#[tokio::test]
async fn a_guest_that_restarts_while_the_store_is_away_is_started_when_it_is_back() {
    let fixture = Fixture::new().await;
    fixture.start().await.unwrap();
    *fixture.host.unreadable.lock().unwrap() = Some("image".to_owned());
    // It runs, and stays on: nothing could be started in its place.
    fixture.service.reset("lab", &Caller::daemon()).await.unwrap_err();
    assert_eq!((fixture.record().await.state, fixture.open_disks()), (MachineState::Booting, 1));

    fixture.vm().end(VmExit::Rebooted);
    until("it is said why", async || fixture.record().await.reason.is_some()).await;
    let record = fixture.record().await;
    assert_eq!((record.state, record.wanted), (MachineState::Stopped, Wanted::Running));
    assert!(record.reason.unwrap().contains("not in this test"));
    *fixture.host.unreadable.lock().unwrap() = None;
    until("it has started", async || fixture.host.vms.lock().unwrap().len() == 2).await;
    until("its start is over", async || fixture.record().await.state == MachineState::Booting).await;
    assert_eq!(fixture.record().await.reason, None);

    // Nobody starts one that is not wanted any more.
    *fixture.host.unreadable.lock().unwrap() = Some("image".to_owned());
    fixture.vm().end(VmExit::Rebooted);
    until("it is said why", async || fixture.record().await.reason.is_some()).await;
    fixture.service.stop("lab", false, &Caller::daemon()).await.unwrap();
    *fixture.host.unreadable.lock().unwrap() = None;
    let record = fixture.record().await;
    fixture
        .service
        .start_if_wanted(record.uuid, "lab", crate::lifecycle::start::StartReason::Restart)
        .await
        .unwrap();
    assert_eq!((record.wanted, record.reason), (Wanted::Stopped, None));
    assert_eq!(fixture.host.vms.lock().unwrap().len(), 2);
}

#[tokio::test]
async fn a_start_that_finds_no_version_says_why_in_the_machine() {
    let fixture = Fixture::new().await;
    fixture.host.versions.lock().unwrap().clear();
    fixture.start().await.unwrap_err();
    let record = fixture.record().await;
    assert_eq!((record.state, record.wanted), (MachineState::Stopped, Wanted::Stopped));
    assert!(record.reason.unwrap().contains("there is no image"));
}

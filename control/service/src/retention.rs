//! What the store is told of the versions that this daemon needs also while no disk is open: below persistent disks and edits, and
//! those that machines and catalogs name; and of the images whose channels they follow. Other daemons of the same store do not remove them.
//!
//! ```text
//!   begin   hold in the store -> noted in the database
//!   end     forgotten in the database -> hold released
//! ```
//! What a crash or a store that is away leaves in between is made good later: the database decides, and
//! what the store holds is compared with it after each change, at the start and before a removal. That is done alone with
//! who is about to use a version ([`Service::using_versions`]), whose hold is there before its row.

use std::collections::HashSet;
use std::collections::hash_map::{Entry, HashMap};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use headwater_api::name::ImageRef;
use headwater_api::{ImageVersion, ProblemKind};
use headwater_db::{PersistentDisk, Purpose};

use crate::Service;
use crate::answer::problem;
use crate::backend::{BackendError, RetentionPurpose, RetentionRoot};
use crate::lifecycle::LifecycleError;

/// The time between two attempts to make the store's holds what the database says.
const RETRY_EVERY_MS: u64 = 60_000;

/// The same at most, where the store does not find something again and again: it may be gone for good.
const RETRY_AT_LEAST_EVERY_MS: u64 = 3_600_000;

/// How long an operation that is done waits for the store to let go of what it held.
const RELEASE_WAIT: Duration = Duration::from_secs(2);

/// Whether the store may hold something else than the database says.
#[derive(Default)]
pub(crate) struct RetentionState {
    may_differ: AtomicBool,
    /// After an attempt that failed.
    not_before_ms: AtomicU64,
    /// How long that one made the next wait. 0: something has changed since, or nothing is left to do.
    pause_ms: AtomicU64,
    /// The images of which something is not held, and what was logged about that.
    lacking: Mutex<HashSet<(String, String)>>,
}

impl RetentionState {
    fn lacking(&self) -> MutexGuard<'_, HashSet<(String, String)>> {
        self.lacking.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Who names a version.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Referrer<'a> {
    Machine(&'a str),
    Catalog(&'a str),
}

/// Where it is named.
#[derive(Clone, Copy, Debug)]
pub(crate) enum ReferenceKind {
    Pin,
    Image,
}

impl Service {
    /// Holds the version below a disk that is about to be kept. The caller uses versions, and has no transaction.
    pub(crate) async fn retain_disk(&self, disk: &PersistentDisk, machine: &str) -> Result<(), BackendError> {
        self.roots_changed();
        for root in of_disk(disk, machine) {
            self.images().retain(&root).await?;
        }
        Ok(())
    }

    /// Lets go of the version below a disk that is not kept any more. What is left is found later, also where the store takes
    /// its time: nobody waits for that who has done all else.
    pub(crate) async fn release_disk(&self, disk: &PersistentDisk) {
        self.roots_changed();
        let releasing = async {
            for root in of_disk(disk, "") {
                if let Err(e) = self.images().release(&root).await {
                    tracing::warn!("the store holds {} for a disk that is gone, for now: {e}", disk.below());
                }
            }
        };
        if tokio::time::timeout(RELEASE_WAIT, releasing).await.is_err() {
            tracing::warn!("the store does not answer, and holds {} for a disk that is gone", disk.below());
        }
    }

    /// Holds the version that a machine or a catalog is about to boot, where its reference names one, else the image. As
    /// [`Service::retain_disk`].
    pub(crate) async fn retain_named(
        &self,
        namer: Referrer<'_>,
        place: ReferenceKind,
        reference: &ImageRef,
        version: &ImageVersion,
    ) -> Result<(), BackendError> {
        self.roots_changed();
        let root = match reference.version {
            Some(_) => of_name(namer, place, version),
            None => of_followers(&reference.image),
        };
        self.images().retain(&root).await
    }

    /// The database says something else than before of what machines boot.
    pub(crate) fn roots_changed(&self) {
        let state = self.hold_state();
        state.pause_ms.store(0, Ordering::SeqCst);
        state.may_differ.store(true, Ordering::SeqCst);
        self.boots_changed();
    }

    /// Makes the store's holds what the database says, where they may differ.
    pub(crate) async fn roots_due(&self) {
        let state = self.hold_state();
        let (now_ms, not_before_ms) = (self.now_ms(), state.not_before_ms.load(Ordering::SeqCst));
        let pause_ms = state.pause_ms.load(Ordering::SeqCst).max(RETRY_EVERY_MS);
        // One that is further away was set before the clock was set back, or before something changed.
        let is_early = now_ms < not_before_ms && not_before_ms <= now_ms.saturating_add(pause_ms);
        if is_early || !state.may_differ.load(Ordering::SeqCst) {
            return;
        }
        if !self.images().keeps_roots() {
            return state.may_differ.store(false, Ordering::SeqCst);
        }
        let _alone = self.removing_versions().await;
        self.match_roots().await;
    }

    /// The same in any case. The caller is alone with the versions.
    pub(crate) async fn match_roots(&self) {
        let state = self.hold_state();
        state.may_differ.store(false, Ordering::SeqCst);
        if !self.images().keeps_roots() {
            return;
        }
        let settled = self.set_and_release().await;
        let paused_ms = state.pause_ms.load(Ordering::SeqCst);
        let pause_ms = match settled {
            Ok(true) => {
                state.pause_ms.store(0, Ordering::SeqCst);
                return state.not_before_ms.store(0, Ordering::SeqCst);
            }
            // Removals look too, however often somebody asks for one.
            Ok(false) if self.now_ms() < state.not_before_ms.load(Ordering::SeqCst) => {
                paused_ms.max(RETRY_EVERY_MS)
            }
            Ok(false) => paused_ms.saturating_mul(2).clamp(RETRY_EVERY_MS, RETRY_AT_LEAST_EVERY_MS),
            Err(e) => {
                tracing::warn!("cannot tell the store now which versions are needed here: {}", problem(&e));
                RETRY_EVERY_MS
            }
        };
        state.not_before_ms.store(self.now_ms().saturating_add(pause_ms), Ordering::SeqCst);
        // Where something changes in this moment it is 0, and stays so: that is not waited for long.
        let _ = state.pause_ms.compare_exchange(paused_ms, pause_ms, Ordering::SeqCst, Ordering::SeqCst);
        state.may_differ.store(true, Ordering::SeqCst);
    }

    /// Whether the store holds all that the database names now. What it did not find it may have at another time.
    async fn set_and_release(&self) -> Result<bool, LifecycleError> {
        let failed = |e| LifecycleError::Orphans("tell the store which versions are needed", e);
        let there = self.images().holds().await.map_err(failed)?;
        let (wanted, unknown, mut first) = self.wanted_roots().await?;
        let (mut is_settled, mut lacking) = (unknown.is_empty(), HashSet::new());
        for root in wanted.iter().filter(|root| !there.iter().any(|it| it.is_same(root))) {
            match self.images().retain(root).await {
                Ok(()) => {}
                // The image is gone: who follows it is told when it starts.
                Err(e) if root.purpose == RetentionPurpose::Follow && e.kind() == ProblemKind::NotFound => {
                    tracing::debug!(image = %root.image, "what machines follow is not in the store: {e}");
                    is_settled = false;
                }
                // It is so already, and to say so is all that can be done now.
                Err(e) if matches!(e.kind(), ProblemKind::Conflict | ProblemKind::NotFound) => {
                    let message = format!("what {} needs is not held in the store: {e}", root.holder);
                    let lack = (root.image.clone(), message.clone());
                    if self.hold_state().lacking().insert(lack.clone()) {
                        tracing::error!(image = %root.image, "{message}");
                    } else {
                        tracing::debug!(image = %root.image, "{message}");
                    }
                    lacking.insert(lack);
                    is_settled &= e.kind() == ProblemKind::Conflict;
                }
                // The others would be waited for as long, alone with the versions.
                Err(e) if e.kind() == ProblemKind::Unavailable => return Err(failed(e)),
                Err(e) => first = first.or(Some(e)),
            }
        }
        // What is held by now, and lacks again later, is an error again.
        *self.hold_state().lacking() = lacking;
        for root in there {
            if unknown.contains(&root.id) || wanted.iter().any(|it| it.is_same(&root)) {
                continue;
            }
            match self.images().release(&root).await {
                Err(e) if e.kind() == ProblemKind::Unavailable => return Err(failed(e)),
                released => first = first.or(released.err()),
            }
        }
        first.map_or(Ok(is_settled), |e| Err(failed(e)))
    }

    /// What is to be held; which references the store could not be asked for, or does not find, and why the first of those that
    /// it could not be asked for. What is held for them stays: a version that is held cannot be gone, so who says that is wrong.
    async fn wanted_roots(
        &self,
    ) -> Result<(Vec<RetentionRoot>, HashSet<String>, Option<BackendError>), LifecycleError> {
        let mut repo = self.db().read().await?;
        let machines = repo.machines().list().await?;
        let catalogs = repo.catalogs().list().await?;
        let disks = repo.persistent_disks().list().await?;
        drop(repo);
        let mut wanted = Vec::new();
        for disk in disks {
            let machine = machines.iter().find(|machine| machine.uuid == disk.machine);
            let name = machine.map_or_else(|| disk.machine.to_string(), |machine| machine.name.clone());
            wanted.extend(of_disk(&disk, &name));
        }
        let mut named = Vec::new();
        for machine in &machines {
            let namer = Referrer::Machine(&machine.name);
            named.extend(machine.pin.as_deref().map(|pin| (namer, ReferenceKind::Pin, pin)));
            // That of a catalog is the catalog's.
            let own = machine.catalog.is_none().then_some(&*machine.image);
            named.extend(own.map(|image| (namer, ReferenceKind::Image, image)));
        }
        for catalog in &catalogs {
            let namer = Referrer::Catalog(&catalog.name);
            named.extend(catalog.pin.as_deref().map(|pin| (namer, ReferenceKind::Pin, pin)));
            named.push((namer, ReferenceKind::Image, &*catalog.image));
        }
        let (mut unknown, mut first, mut followed) = (HashSet::new(), None, HashSet::new());
        // Many machines have one version: each is asked of the store once.
        let mut known: HashMap<&str, Option<ImageVersion>> = HashMap::new();
        for (namer, place, text) in named {
            let Ok(reference) = ImageRef::parse(text) else { continue };
            if reference.version.is_none() {
                followed.insert(reference.image);
                continue;
            }
            let version = match known.entry(text) {
                Entry::Occupied(known) => known.into_mut(),
                Entry::Vacant(place) => place.insert(match self.images().resolve(&reference).await {
                    Ok(version) => Some(version),
                    Err(e) if e.kind() == ProblemKind::NotFound => None,
                    Err(e) => {
                        first = first.or(Some(e));
                        None
                    }
                }),
            };
            match version {
                Some(version) => wanted.push(of_name(namer, place, version)),
                None => drop(unknown.insert(id_of(namer, place))),
            }
        }
        wanted.extend(followed.iter().map(|image| of_followers(image)));
        Ok((wanted, unknown, first))
    }
}

/// The version is held for the disk in any case, and for the edit where that is the only one.
fn of_disk(disk: &PersistentDisk, machine: &str) -> Vec<RetentionRoot> {
    let root = |purpose| RetentionRoot {
        purpose,
        id: disk.id.to_string(),
        image: disk.image.clone(),
        hash: Some(disk.hash.clone()),
        holder: format!("machine '{machine}'"),
    };
    let mut holds = vec![root(RetentionPurpose::Disk)];
    if disk.purpose == Purpose::MaintenanceSession {
        holds.push(root(RetentionPurpose::MaintenanceSession));
    }
    holds
}

fn of_name(namer: Referrer<'_>, place: ReferenceKind, version: &ImageVersion) -> RetentionRoot {
    let holder = match namer {
        Referrer::Machine(name) => format!("machine '{name}'"),
        Referrer::Catalog(name) => format!("catalog '{name}'"),
    };
    let (image, hash) = (version.image.clone(), Some(version.hash.clone()));
    RetentionRoot { purpose: RetentionPurpose::Pin, id: id_of(namer, place), image, hash, holder }
}

/// One for all of them: there may be hundreds.
fn of_followers(image: &str) -> RetentionRoot {
    RetentionRoot {
        purpose: RetentionPurpose::Follow,
        id: "image".to_owned(),
        image: image.to_owned(),
        hash: None,
        holder: "a machine or catalog".to_owned(),
    }
}

/// Machines and catalogs share their names.
fn id_of(namer: Referrer<'_>, place: ReferenceKind) -> String {
    let (Referrer::Machine(name) | Referrer::Catalog(name)) = namer;
    let place = match place {
        ReferenceKind::Pin => "pin",
        ReferenceKind::Image => "image",
    };
    format!("{place}.{name}")
}

//! Keeps retention roots in the store: the versions and images that this daemon needs even if no disk is open, so that
//! other daemons of the same store do not remove them. These are versions below persistent disks and maintenance
//! sessions, versions that machines and catalogs name, and images whose channels they follow.
//!
//! ```text
//!   begin   root added in the store -> use recorded in the database
//!   end     use removed from the database -> root removed from the store
//! ```
//! A crash or an unavailable store in between leaves a difference, which is removed later: the database decides, and
//! the store's roots are compared with it after each change, at the start and before a removal. The comparison excludes
//! callers that are about to use a version ([`Service::using_versions`]), because their root exists before their row.

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

/// The time between two attempts to make the store's roots match the database.
const RETRY_INTERVAL_MS: u64 = 60_000;

/// The longest such time, if the store repeatedly misses a version: it may be lost.
const RETRY_INTERVAL_MAX_MS: u64 = 3_600_000;

/// How long a completed operation waits for the store to remove a root.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(2);

/// Whether the roots in the store may differ from the database.
#[derive(Default)]
pub(crate) struct RetentionState {
    may_differ: AtomicBool,
    /// When the next attempt after a failed one is made, at the earliest.
    not_before_ms: AtomicU64,
    /// The pause after the last failed attempt. 0: something has changed since, or the roots match.
    pause_ms: AtomicU64,
    /// The roots that could not be added: their images, and the message that was logged.
    missing: Mutex<HashSet<(String, String)>>,
}

impl RetentionState {
    fn missing(&self) -> MutexGuard<'_, HashSet<(String, String)>> {
        self.missing.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The user of a version.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Referrer<'a> {
    Machine(&'a str),
    Catalog(&'a str),
}

/// How a version is named.
#[derive(Clone, Copy, Debug)]
pub(crate) enum ReferenceKind {
    Pin,
    Image,
}

impl Service {
    /// Adds the root of a version below a new persistent disk. The caller holds [`Service::using_versions`], and has no
    /// transaction.
    pub(crate) async fn retain_disk(&self, disk: &PersistentDisk, machine: &str) -> Result<(), BackendError> {
        self.roots_changed();
        for root in of_disk(disk, machine) {
            self.images().retain(&root).await?;
        }
        Ok(())
    }

    /// Removes the root of a version below a disk that was removed. If the store is slow or fails, a later comparison
    /// removes the root: the operation itself is complete.
    pub(crate) async fn release_disk(&self, disk: &PersistentDisk) {
        self.roots_changed();
        let releasing = async {
            for root in of_disk(disk, "") {
                if let Err(e) = self.images().release(&root).await {
                    tracing::warn!(
                        "cannot remove the retention root of {} now, whose disk was removed; it is tried again: {}",
                        disk.below(),
                        problem(&e)
                    );
                }
            }
        };
        if tokio::time::timeout(RELEASE_TIMEOUT, releasing).await.is_err() {
            tracing::warn!(
                "the store does not answer, so the retention root of {}, whose disk was removed, stays for now",
                disk.below()
            );
        }
    }

    /// Adds the root of the version that a machine or a catalog is about to boot, if its reference names a version; else
    /// that of the image. As in
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

    /// The database has changed what machines boot.
    pub(crate) fn roots_changed(&self) {
        let state = self.hold_state();
        state.pause_ms.store(0, Ordering::SeqCst);
        state.may_differ.store(true, Ordering::SeqCst);
        self.boots_changed();
    }

    /// Makes the store's roots match the database, if they may differ and an attempt is due.
    pub(crate) async fn roots_due(&self) {
        let state = self.hold_state();
        let (now_ms, not_before_ms) = (self.now_ms(), state.not_before_ms.load(Ordering::SeqCst));
        let pause_ms = state.pause_ms.load(Ordering::SeqCst).max(RETRY_INTERVAL_MS);
        // A time that is further away was set before the clock was set back, or before something changed.
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

    /// Makes the store's roots match the database now. The caller excludes users of versions.
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
            // Removals also get here, however often somebody requests one.
            Ok(false) if self.now_ms() < state.not_before_ms.load(Ordering::SeqCst) => {
                paused_ms.max(RETRY_INTERVAL_MS)
            }
            Ok(false) => paused_ms.saturating_mul(2).clamp(RETRY_INTERVAL_MS, RETRY_INTERVAL_MAX_MS),
            Err(e) => {
                tracing::warn!(
                    "cannot write retention roots to the store now; it is tried again: {}",
                    problem(&e)
                );
                RETRY_INTERVAL_MS
            }
        };
        state.not_before_ms.store(self.now_ms().saturating_add(pause_ms), Ordering::SeqCst);
        // If something changes at this moment the value is 0 and stays 0, so the next attempt is soon.
        let _ = state.pause_ms.compare_exchange(paused_ms, pause_ms, Ordering::SeqCst, Ordering::SeqCst);
        state.may_differ.store(true, Ordering::SeqCst);
    }

    /// Adds and removes roots. Returns whether the store has all roots that the database needs. A version that was not
    /// found may be found later.
    async fn set_and_release(&self) -> Result<bool, LifecycleError> {
        let failed = |e| LifecycleError::Orphans("tell the store which versions are needed", e);
        let there = self.images().holds().await.map_err(failed)?;
        let (wanted, unknown, mut first) = self.wanted_roots().await?;
        let (mut is_settled, mut missing) = (unknown.is_empty(), HashSet::new());
        for root in wanted.iter().filter(|root| !there.iter().any(|it| it.is_same(root))) {
            match self.images().retain(root).await {
                Ok(()) => {}
                // The image was removed: the start of a machine that follows it reports that.
                Err(e) if root.purpose == RetentionPurpose::Follow && e.kind() == ProblemKind::NotFound => {
                    tracing::debug!(image = %root.image, "the store does not have an image that machines follow: {e}");
                    is_settled = false;
                }
                // Repeating it would fail in the same way, so report it once.
                Err(e) if matches!(e.kind(), ProblemKind::Conflict | ProblemKind::NotFound) => {
                    let message = format!("cannot retain the version that {} needs: {e}", root.holder);
                    let lack = (root.image.clone(), message.clone());
                    if self.hold_state().missing().insert(lack.clone()) {
                        tracing::error!(image = %root.image, "{message}");
                    } else {
                        tracing::debug!(image = %root.image, "{message}");
                    }
                    missing.insert(lack);
                    is_settled &= e.kind() == ProblemKind::Conflict;
                }
                // The other roots would take just as long, while all users of versions are excluded.
                Err(e) if e.kind() == ProblemKind::Unavailable => return Err(failed(e)),
                Err(e) => first = first.or(Some(e)),
            }
        }
        // A root that was added now and fails again later is reported again.
        *self.hold_state().missing() = missing;
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

    /// The roots that the database needs, the references that the store could not resolve or does not find, and the first
    /// error of the former. Existing roots for them stay: a retained version cannot be removed, so a store that does not
    /// find it is wrong.
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
            // A reference of the catalog counts for the catalog.
            let own = machine.catalog.is_none().then_some(&*machine.image);
            named.extend(own.map(|image| (namer, ReferenceKind::Image, image)));
        }
        for catalog in &catalogs {
            let namer = Referrer::Catalog(&catalog.name);
            named.extend(catalog.pin.as_deref().map(|pin| (namer, ReferenceKind::Pin, pin)));
            named.push((namer, ReferenceKind::Image, &*catalog.image));
        }
        let (mut unknown, mut first, mut followed) = (HashSet::new(), None, HashSet::new());
        // Many machines name the same version: ask the store once for each.
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

/// A root for the disk itself; for a maintenance session also one that makes it the only session of the image.
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

/// One root for all machines that follow the image: there may be hundreds.
fn of_followers(image: &str) -> RetentionRoot {
    RetentionRoot {
        purpose: RetentionPurpose::Follow,
        id: "image".to_owned(),
        image: image.to_owned(),
        hash: None,
        holder: "a machine or catalog".to_owned(),
    }
}

/// Machines and catalogs do not share names, so a name is unique.
fn id_of(namer: Referrer<'_>, place: ReferenceKind) -> String {
    let (Referrer::Machine(name) | Referrer::Catalog(name)) = namer;
    let place = match place {
        ReferenceKind::Pin => "pin",
        ReferenceKind::Image => "image",
    };
    format!("{place}.{name}")
}

//! The images of a store: implements the service's trait [`Images`] (list, import, promote, verify, diff, export, remove and others) with
//! `headwater_store` and `headwater_image`. The daemon has one [`StoredImages`]. Work on the store runs on threads of its own, at most
//! [`MAX_OPERATIONS`] at a time. Machines' disks are not opened here, but in [`super::disks`].

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use headwater_api::name::ImageRef;
use headwater_api::platform::Firmware;
use headwater_api::{
    BootTrace, ChangedFile, Channel, ChannelPointer, DiffReport, ExportFormat, FileChange, Image,
    ImageVersion, PartitionDifference, ProblemKind, Removed, VerifyReport, VerifyRequest,
};
use headwater_block::{Device, size};
use headwater_filesystems::{ReadAt, efi};
use headwater_image::{
    Cancel, DiffProgress, Difference, ImageError, ImageErrorKind, Manifests, Outline, VerifyRound,
    VersionReader, outline_of,
};
use headwater_service::backend::{
    BackendError, Images, ImportOrder, ImportOutcome, Listed, Promoted, Promotion, PullOrder, PullOutcome,
    Pulled, RetentionRoot, ServersGone, TaskControl,
};
use headwater_store::{
    Hash, ImageName, ImageReference, Pointer, Selector, Store, StoreError, StoreErrorKind, Version, WhileBusy,
};
use tokio::sync::{Semaphore, mpsc};
use tokio::task::JoinHandle;

use crate::adapters::disk_host::BootTraces;
use crate::adapters::disks::blocking;
use crate::adapters::promotions::Promotions;
use crate::adapters::retention::{DaemonName, from_store};
use crate::adapters::{boot_traces, convert, pulls, sources};
use crate::failure::{image_kind, store_kind};
use crate::last_known::LastKnown;
use crate::stores::NamedServers;
use crate::verification::{self, Checked, Doing};

/// The images of one store.
pub struct StoredImages {
    store: Arc<dyn Store>,
    traces: Arc<dyn BootTraces>,
    /// The credentials for servers that requests name.
    servers: NamedServers,
    promotions: Arc<Promotions>,
    last_known: Arc<LastKnown>,
    /// The name of this daemon, under which it retains versions.
    daemon: DaemonName,
    /// When removed versions were last checked for data that can be freed, in seconds since 1970.
    reclaimed_at_s: AtomicU64,
    /// Limits concurrent operations on the store.
    permits: Arc<Semaphore>,
}

/// The most concurrent operations on the store, each on its own thread. If a store hangs, threads of cancelled requests
/// remain, and the disks need threads too.
const MAX_OPERATIONS: usize = 64;

/// How often removed versions are checked for data that is not in use any more, for a store on this host; a check reads
/// little.
const RECLAIM_INTERVAL_S: u64 = 60;
/// The same for a remote store: while data is in use, a check lists the store.
const RECLAIM_INTERVAL_REMOTE_S: u64 = 600;

/// How long the removal of a version waits until its space is freed; freeing continues in the background after that.
/// Freeing one gigabyte reads it, which takes one or more seconds.
const TRIM_TIMEOUT: Duration = Duration::from_secs(5);

/// A server of the store that does not answer for this time raises an alarm. A server that restarts is back sooner.
const UNREACHABLE_AFTER: Duration = Duration::from_secs(10);

impl StoredImages {
    /// The images of `store`. `daemon` is the name under which versions are retained. `traces` has the boot traces.
    /// `servers` has the credentials for servers from which images are pulled or repaired. Only disks wait for a
    /// store that does not answer: these operations return an error soon.
    pub fn new(
        store: Arc<dyn Store>,
        traces: Arc<dyn BootTraces>,
        servers: NamedServers,
        last_known: Arc<LastKnown>,
        daemon: DaemonName,
    ) -> Self {
        let store = store.fail_fast().unwrap_or(store);
        let promotions = Arc::new(Promotions::new(Arc::clone(&store)));
        let reclaimed_at_s = AtomicU64::new(0);
        let permits = Arc::new(Semaphore::new(MAX_OPERATIONS));
        Self { store, traces, servers, promotions, last_known, daemon, reclaimed_at_s, permits }
    }

    /// Runs a blocking operation on its own thread, after a permit for it is free. If the caller is dropped before that,
    /// the operation does not run.
    async fn blocking<T: Send + 'static>(
        &self,
        what: &'static str,
        work: impl FnOnce() -> Result<T, BackendError> + Send + 'static,
    ) -> Result<T, BackendError> {
        // The semaphore is never closed.
        let permit = Arc::clone(&self.permits).acquire_owned().await;
        blocking(what, move || {
            let _place = permit;
            work()
        })
        .await
    }

    /// Frees the parts of data objects that no version needs, on its own thread, which continues if nobody waits. Does
    /// nothing if that already runs.
    fn trim(&self) -> JoinHandle<u64> {
        let store = Arc::clone(&self.store);
        tokio::task::spawn_blocking(move || {
            let freed_bytes = store.trim(&Manifests).unwrap_or_else(|error| {
                tracing::warn!(%error, "cannot free the space of removed versions now; it is tried again later");
                0
            });
            if freed_bytes > 0 {
                tracing::info!(bytes = freed_bytes, "freed space that no version needs");
            }
            freed_bytes
        })
    }
}

/// Fails if a machine with this firmware cannot boot the version.
pub fn check_bootable(
    version: &ImageVersion,
    outline: &Outline,
    firmware: Firmware,
) -> Result<(), BackendError> {
    let why = match firmware {
        Firmware::Bios => outline.why_bios_cannot_boot(),
        // UEFI with larger sectors is untested.
        Firmware::Uefi if outline.sector_bytes() != SECTOR_BYTES => Some(format!(
            "its sectors have {} bytes, and machines boot from sectors of 512 only",
            outline.sector_bytes()
        )),
        Firmware::Uefi => None,
    };
    let Some(why) = why else { return Ok(()) };
    let name = firmware.name().to_uppercase();
    let message = format!("a machine with {name} cannot boot {}@{}: {why}", version.image, version.number);
    let advice = if firmware == Firmware::Bios && outline.sector_bytes() == SECTOR_BYTES {
        "give the machine --firmware uefi, or install a boot loader for BIOS in the image"
    } else {
        "'headwater export' serves the disk to other hypervisors; a machine here needs a disk with sectors of 512 bytes"
    };
    Err(BackendError::new(ProblemKind::Invalid, message).advise(advice))
}

/// Fails if the version's boot loader has no signature, for a machine with Secure Boot.
pub fn check_signed(version: &ImageVersion, reader: &Arc<VersionReader>) -> Result<(), BackendError> {
    let sector_bytes = reader.outline().sector_bytes().into();
    let disk: Arc<dyn Device> = reader.clone();
    // These reads are not recorded in the boot trace.
    let disk: Arc<dyn ReadAt> = Arc::new(Arc::clone(&disk).unrecorded().unwrap_or(disk));
    // Other faults of the loader are reported by the firmware.
    if efi::is_loader_signed(&disk, sector_bytes) != Some(false) {
        return Ok(());
    }
    let message = format!(
        "a machine with Secure Boot cannot boot {}@{}: its loader \\{} is not signed",
        version.image,
        version.number,
        efi::LOADER.join("\\")
    );
    Err(BackendError::new(ProblemKind::Invalid, message).advise(
        "put a loader there that is signed with Microsoft's keys, such as Debian's shim-signed with grub-efi-amd64-signed, or \
         create the machine without --secure-boot",
    ))
}

/// The sector size from which all firmware boots.
const SECTOR_BYTES: u32 = 512;

/// The error of a failed list of images. If a server of the store answers, the store works but cannot list its images:
/// a plain web server has no list, and the errors of other servers do not matter.
fn list_failed(store: &dyn Store, error: StoreError) -> BackendError {
    let is_up = store.is_read_only() && store.traffic().is_some_and(|traffic| traffic.servers_up > 0);
    match store_failed(error) {
        failed if is_up && failed.kind() == ProblemKind::Failed => {
            BackendError::new(ProblemKind::Unavailable, failed.to_string())
        }
        failed => failed,
    }
}

#[async_trait]
impl Images for StoredImages {
    async fn list(&self) -> Result<Listed, BackendError> {
        let store = self.store.clone();
        self.blocking("list the images", move || {
            let listed = store.listed().map_err(|e| list_failed(&*store, e))?;
            let unreadable = listed.unreadable.into_iter().map(|(_, e)| store_failed(e));
            Ok(Listed {
                images: listed.images.iter().map(image_of).collect(),
                unreadable: unreadable.collect(),
            })
        })
        .await
    }

    async fn image(&self, name: &str) -> Result<Option<Image>, BackendError> {
        let (store, name) = (self.store.clone(), name.parse::<ImageName>().map_err(store_failed)?);
        self.blocking("look an image up", move || {
            let image = store.image(&name).map_err(store_failed)?;
            Ok(image.as_ref().map(image_of))
        })
        .await
    }

    async fn resolve(&self, reference: &ImageRef) -> Result<ImageVersion, BackendError> {
        let (store, reference) = (self.store.clone(), parse(reference)?);
        let last_known = Arc::clone(&self.last_known);
        self.blocking("look an image up", move || {
            let image = last_known.look_up(&*store, &reference.name).map_err(store_failed)?;
            let image = match image {
                Some(image) => image,
                None => return Err(store_failed(store.resolve(&reference).err().unwrap_or_else(gone))),
            };
            let version = image.select(&reference.selector).map_err(store_failed)?;
            Ok(version_of(&image, version))
        })
        .await
    }

    fn is_read_only(&self) -> bool {
        self.store.is_read_only()
    }

    fn boots_unrecorded(&self) -> Option<String> {
        self.traces.unrecorded()
    }

    async fn check_bootable(&self, version: &ImageVersion, firmware: Firmware) -> Result<(), BackendError> {
        let (store, hash, version) = (self.store.clone(), hash_of(version)?, version.clone());
        self.blocking("look up what boots an image", move || match outline_of(&*store, hash) {
            Ok(outline) => check_bootable(&version, &outline, firmware),
            // Not an error here, because the start checks it again.
            Err(error) => {
                tracing::debug!(image = %version.image, number = version.number, %error, "cannot determine the boot loaders of a version");
                Ok(())
            }
        })
        .await
    }

    async fn import(
        &self,
        order: ImportOrder,
        control: Arc<TaskControl>,
    ) -> Result<ImportOutcome, BackendError> {
        let store = self.store.clone();
        self.blocking("import an image", move || sources::import(&*store, &order, &control)).await
    }

    async fn pull(
        &self,
        order: PullOrder,
        control: Arc<TaskControl>,
        told: mpsc::Sender<Pulled>,
    ) -> Result<PullOutcome, BackendError> {
        let (store, servers) = (self.store.clone(), self.servers.clone());
        let promotions = Arc::clone(&self.promotions);
        self.blocking("pull versions", move || {
            pulls::pull(&*store, &order, &servers, &control, &mut |pulled| {
                if !pulled.image.scheduled.is_empty() || pulled.tried.is_some() {
                    promotions.expect(0);
                }
                let image = pulled.image.image.clone();
                if told.blocking_send(pulled).is_err() {
                    tracing::error!(
                        image,
                        "the history misses what a pull did, because its request has ended"
                    );
                }
            })
        })
        .await
    }

    async fn promote(&self, promotion: &Promotion) -> Result<(Option<u64>, Option<Promotion>), BackendError> {
        let (image, pointer) = (&promotion.image, pointer_of(promotion)?);
        let (before, forgets) = self.change(image, move |image| image.promote(pointer.clone())).await?;
        Ok((before.map(u64::from), forgets.map(|pointer| promotion_of(image, pointer))))
    }

    async fn schedule(&self, promotion: &Promotion) -> Result<Option<Promotion>, BackendError> {
        let (image, pointer) = (&promotion.image, pointer_of(promotion)?);
        let at_s = pointer.at_s;
        let forgets = self.change(image, move |image| image.schedule(pointer.clone())).await?;
        self.promotions.expect(at_s);
        Ok(forgets.map(|pointer| promotion_of(image, pointer)))
    }

    async fn cancel_promotion(&self, image: &str, channel: Channel) -> Result<Promotion, BackendError> {
        let pointer = self.change(image, move |image| image.cancel(stored_channel(channel))).await?;
        Ok(promotion_of(image, pointer))
    }

    async fn promote_due(&self, now_ms: u64) -> Result<Promoted, BackendError> {
        let now_s = now_ms / 1000;
        if !self.promotions.is_time(now_s) {
            return Ok(Promoted::default());
        }
        let promotions = Arc::clone(&self.promotions);
        self.blocking("make scheduled promotions", move || promotions.carry_out(now_s)).await
    }

    async fn reclaim_due(&self, now_ms: u64) -> Result<u64, BackendError> {
        let (now_s, last_s) = (now_ms / 1000, self.reclaimed_at_s.load(Ordering::Relaxed));
        let every_s = if self.store.is_remote() { RECLAIM_INTERVAL_REMOTE_S } else { RECLAIM_INTERVAL_S };
        // `abs_diff`: if the clock was set back, its present time counts.
        if self.store.is_read_only() || now_s.abs_diff(last_s) < every_s {
            return Ok(0);
        }
        self.reclaimed_at_s.store(now_s, Ordering::Relaxed);
        let store = self.store.clone();
        let freed = self
            .blocking("free what removals left", move || store.reclaim_left().map_err(store_failed))
            .await;
        // Frees data that the removed versions kept. Promotions that are due do not wait for it.
        drop(self.trim());
        freed
    }

    async fn revert(&self, image: &str, channel: Channel) -> Result<(u64, Option<u64>), BackendError> {
        let (from, to) = self.change(image, move |image| image.revert(stored_channel(channel))).await?;
        Ok((u64::from(from), to.map(u64::from)))
    }

    async fn retire(&self, version: &ImageVersion, retired: bool) -> Result<(), BackendError> {
        let number = number_of(version.number)?;
        self.change(&version.image, move |image| image.retire(number, retired)).await
    }

    async fn set_note(&self, version: &ImageVersion, note: &str) -> Result<String, BackendError> {
        let (number, note) = (number_of(version.number)?, note.to_owned());
        self.change(&version.image, move |image| image.set_note(number, &note)).await
    }

    async fn verify(
        &self,
        version: &ImageVersion,
        request: &VerifyRequest,
        control: Arc<TaskControl>,
    ) -> Result<VerifyReport, BackendError> {
        let (store, version) = (self.store.clone(), version.clone());
        let (VerifyRequest { repair_from, rate_bytes_s }, servers) = (request.clone(), self.servers.clone());
        self.blocking("verify an image", move || {
            // Resolve the name first, so that a wrong name fails before hours of reading.
            let opened =
                repair_from.iter().map(|name| sources::open_store(name, &servers, WhileBusy::default()));
            let sources = verification::not_waited_for(opened.collect::<Result<Vec<_>, _>>()?);
            verify(&*store, version, (&VerifyRound::new(rate_bytes_s), &sources), &control)
        })
        .await
    }

    async fn diff(
        &self,
        from: &ImageVersion,
        to: &ImageVersion,
        control: Arc<TaskControl>,
    ) -> Result<DiffReport, BackendError> {
        let (store, from, to) = (self.store.clone(), from.clone(), to.clone());
        self.blocking("compare versions", move || {
            let told = &mut |at: DiffProgress| match at {
                DiffProgress::Chunks(at) => control.report(at.done_bytes, at.total_bytes),
                DiffProgress::Files { compared_bytes } => {
                    control
                        .report_doing(format!("comparing files: {} compared", size::format(compared_bytes)));
                }
            };
            let (cancel, hashes) = (cancel_of(&control), (hash_of(&from)?, hash_of(&to)?));
            let found = headwater_image::diff(&*store, hashes.0, hashes.1, &cancel, told);
            found.map(|found| diff_report(from, to, found)).map_err(image_failed)
        })
        .await
    }

    async fn export(
        &self,
        version: &ImageVersion,
        target: &Path,
        format: ExportFormat,
        control: Arc<TaskControl>,
    ) -> Result<u64, BackendError> {
        let (store, version, target) = (self.store.clone(), version.clone(), target.to_owned());
        self.blocking("export an image", move || match format {
            ExportFormat::Raw | ExportFormat::Qcow2 | ExportFormat::VhdFixed => {
                export(&*store, &version, &target, format, &control)
            }
            other => convert::export(&*store, &version, hash_of(&version)?, &target, other, &control),
        })
        .await
    }

    async fn remove(&self, reference: &ImageRef, with_channels: bool) -> Result<Removed, BackendError> {
        let (store, reference) = (self.store.clone(), parse(reference)?);
        let removed = self.blocking("remove an image", move || {
            let name = &reference.name;
            let removed = match reference.selector {
                Selector::Default if with_channels => store.remove(name, None),
                Selector::Default => store.remove_unless_promoted(name),
                Selector::Channel(_) | Selector::Number(_) | Selector::HashPrefix(_) => {
                    let version = store.resolve(&reference).map_err(store_failed)?;
                    store.remove(name, Some(version.number))
                }
            };
            let removed = removed.map_err(store_failed)?;
            let names = removed.versions.iter().map(|number| format!("{name}@{number}"));
            Ok(Removed { removed: names.collect(), freed_bytes: removed.freed_bytes })
        });
        let mut removed = removed.await?;
        // The versions are removed, whether or not their space is freed in time.
        if let Ok(Ok(freed_bytes)) = tokio::time::timeout(TRIM_TIMEOUT, self.trim()).await {
            removed.freed_bytes = removed.freed_bytes.saturating_add(freed_bytes);
        }
        Ok(removed)
    }

    fn keeps_roots(&self) -> bool {
        self.store.keeps_roots()
    }

    async fn retain(&self, root: &RetentionRoot) -> Result<(), BackendError> {
        let (store, root) = (self.store.clone(), self.daemon.to_store(root)?);
        self.blocking("retain a version", move || store.retain(&root).map_err(hold_failed)).await
    }

    async fn release(&self, root: &RetentionRoot) -> Result<(), BackendError> {
        let (store, root) = (self.store.clone(), self.daemon.to_store(root)?);
        self.blocking("release a version", move || store.release(&root).map_err(hold_failed)).await
    }

    async fn holds(&self) -> Result<Vec<RetentionRoot>, BackendError> {
        let (store, daemon) = (self.store.clone(), self.daemon.id.clone());
        let held =
            self.blocking("see what is held", move || store.roots_of(&daemon).map_err(store_failed)).await?;
        Ok(held.into_iter().map(from_store).collect())
    }

    async fn trace(&self, version: &ImageVersion) -> Result<BootTrace, BackendError> {
        let (store, traces, version) = (self.store.clone(), self.traces.clone(), version.clone());
        self.blocking("read a boot trace", move || boot_traces::show(&*store, &*traces, &version)).await
    }

    async fn merge_trace(&self, version: &ImageVersion, source: &Path) -> Result<BootTrace, BackendError> {
        let (store, traces, version) = (self.store.clone(), self.traces.clone(), version.clone());
        let source = source.to_owned();
        self.blocking("merge boot traces", move || boot_traces::merge(&*store, &*traces, &version, &source))
            .await
    }

    async fn save_trace(&self, version: &ImageVersion, target: &Path) -> Result<BootTrace, BackendError> {
        let (store, traces, version) = (self.store.clone(), self.traces.clone(), version.clone());
        let target = target.to_owned();
        self.blocking("write a boot trace", move || boot_traces::save(&*store, &*traces, &version, &target))
            .await
    }

    async fn remove_trace(&self, version: &ImageVersion) -> Result<BootTrace, BackendError> {
        let (store, traces, version) = (self.store.clone(), self.traces.clone(), version.clone());
        self.blocking("remove a boot trace", move || boot_traces::remove(&*store, &*traces, &version)).await
    }

    async fn stored_bytes(&self) -> Result<u64, BackendError> {
        let store = self.store.clone();
        self.blocking("measure the store", move || store.stored_bytes().map_err(store_failed)).await
    }

    fn servers_gone(&self) -> Option<ServersGone> {
        let traffic = self.store.traffic()?;
        let gone = traffic.servers.saturating_sub(traffic.servers_up);
        let gone_for = Duration::from_millis(traffic.longest_away_ms);
        let is_part = gone > 0 && traffic.servers_up > 0;
        (is_part && gone_for >= UNREACHABLE_AFTER).then_some(ServersGone {
            gone,
            servers: traffic.servers,
            gone_for,
            why: traffic.reasons,
        })
    }
}

impl StoredImages {
    /// Changes an image's channels, flags or notes.
    async fn change<T: Send + 'static>(
        &self,
        image: &str,
        mut change: impl FnMut(&mut headwater_store::Image) -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, BackendError> {
        let name: ImageName = image.parse().map_err(store_failed)?;
        let store = self.store.clone();
        self.blocking("change an image", move || {
            let mut outcome = None;
            let changed = store.change(&name, &mut |image| {
                outcome = Some(change(image)?);
                Ok(())
            });
            changed.map_err(store_failed)?;
            outcome.ok_or_else(|| store_failed(gone()))
        })
        .await
    }
}

/// Another caller has just removed the image.
pub(super) fn gone() -> StoreError {
    StoreError::new(StoreErrorKind::NotFound, "the image was removed meanwhile")
}

fn export(
    store: &dyn Store,
    version: &ImageVersion,
    target: &Path,
    format: ExportFormat,
    control: &Arc<TaskControl>,
) -> Result<u64, BackendError> {
    let (manifest, cancel, mut forward) = (hash_of(version)?, cancel_of(control), forward(control));
    let written = match format {
        ExportFormat::Qcow2 => headwater_image::export_qcow2(store, manifest, target, &cancel, &mut forward),
        ExportFormat::VhdFixed => headwater_image::export_fixed_vhd(
            store,
            manifest,
            version.created_at_ms,
            target,
            &cancel,
            &mut forward,
        ),
        _ => headwater_image::export_raw(store, manifest, target, &cancel, &mut forward)
            .map(|()| version.size_bytes),
    };
    written.map_err(image_failed)
}

fn diff_report(from: ImageVersion, to: ImageVersion, found: Difference) -> DiffReport {
    let change = |change| match change {
        headwater_image::FileChange::Added => FileChange::Added,
        headwater_image::FileChange::Removed => FileChange::Removed,
        headwater_image::FileChange::Changed => FileChange::Changed,
        headwater_image::FileChange::Attributes => FileChange::Attributes,
    };
    let file = |file: headwater_image::ChangedFile| ChangedFile {
        path: file.path,
        change: change(file.change),
        size_bytes: file.size_bytes,
    };
    let partition = |partition: headwater_image::PartitionDifference| PartitionDifference {
        number: partition.number,
        offset_bytes: partition.offset_bytes,
        len_bytes: partition.len_bytes,
        changed_bytes: partition.changed_bytes,
        files: partition.files.map(|files| files.into_iter().map(file).collect()),
        remark: partition.remark,
    };
    DiffReport {
        from,
        to,
        changed_chunks: found.changed_chunks,
        changed_bytes: found.changed_bytes,
        partitions: found.partitions.into_iter().map(partition).collect(),
    }
}

fn verify(
    store: &dyn Store,
    version: ImageVersion,
    how: (&VerifyRound, &[Arc<dyn Store>]),
    control: &Arc<TaskControl>,
) -> Result<VerifyReport, BackendError> {
    let (cancel, hash) = (cancel_of(control), hash_of(&version)?);
    let names = [format!("{}@{}", version.image, version.number)];
    let told = &mut |doing: Doing| match doing {
        Doing::Reading(at) => control.report(at.done_bytes, at.total_bytes),
        other => control.report_doing(other.to_string()),
    };
    let checked = verification::check(store, hash, &names, how, &cancel, told);
    let checked = checked.map_err(image_failed)?.ok_or_else(|| store_failed(gone()))?;
    let Checked { chunks, repaired, damaged_chunks, damage, files, remarks, versions } = checked;
    let checked_bytes = chunks.saturating_mul(u64::from(store.chunk_bytes()));
    // The service adds the users of these versions.
    let uses = Vec::new();
    Ok(VerifyReport {
        version,
        checked_bytes,
        damage,
        damaged_chunks,
        repaired,
        files,
        remarks,
        versions,
        uses,
    })
}

/// The cancellation of the task, for an operation that may report no progress.
pub(super) fn cancel_of(control: &Arc<TaskControl>) -> Cancel {
    let control = Arc::clone(control);
    Cancel::when(move || control.is_cancelled())
}

/// Forwards progress to the task.
pub(super) fn forward(control: &TaskControl) -> impl FnMut(headwater_image::Progress) + '_ {
    move |progress| control.report(progress.done_bytes, progress.total_bytes)
}

pub(super) fn parse(reference: &ImageRef) -> Result<ImageReference, BackendError> {
    reference.to_string().parse().map_err(store_failed)
}

pub(super) fn hash_of(version: &ImageVersion) -> Result<Hash, BackendError> {
    let odd = || BackendError::new(ProblemKind::Failed, format!("'{}' is not a hash", version.hash));
    version.hash.parse().map_err(|_| odd())
}

pub(super) fn pointer_view(pointer: &Pointer) -> ChannelPointer {
    ChannelPointer {
        channel: channel_view(pointer.channel),
        version: u64::from(pointer.version),
        at_ms: pointer.at_s.saturating_mul(1000),
        author: pointer.author.clone(),
    }
}

fn image_of(image: &headwater_store::Image) -> Image {
    Image {
        name: image.name.to_string(),
        versions: image.versions.iter().map(|version| version_of(image, version)).collect(),
        pointers: image.pointers().iter().map(pointer_view).collect(),
        scheduled: image.scheduled().iter().map(pointer_view).collect(),
        edit: None,
    }
}

/// The view of a version that was made. If its channels cannot be read, the view has none, because the version exists
/// anyway.
pub(super) fn made(store: &dyn Store, name: ImageName, version: &Version) -> ImageVersion {
    let image = store.image(&name).unwrap_or_else(|error| {
        tracing::warn!(image = %name, version = version.number, %error, "cannot read the list of versions after one was made, so it is shown without channels");
        None
    });
    version_of(&image.unwrap_or_else(|| headwater_store::Image::empty(name)), version)
}

pub(super) fn version_of(image: &headwater_store::Image, version: &Version) -> ImageVersion {
    let points_here = |channel: &headwater_store::Channel| {
        let selected = image.select(&Selector::Channel(*channel));
        selected.is_ok_and(|selected| selected.number == version.number)
    };
    ImageVersion {
        image: image.name.to_string(),
        number: u64::from(version.number),
        hash: version.manifest.to_string(),
        size_bytes: version.size_bytes,
        stored_bytes: version.stored_bytes,
        created_at_ms: version.created_at_s.saturating_mul(1000),
        source: version.source.clone(),
        note: version.note.clone(),
        author: version.author.clone(),
        retired: version.retired,
        keeps_identity: version.keeps_identity,
        channels: headwater_store::Channel::ALL.into_iter().filter(points_here).map(channel_view).collect(),
    }
}

pub(super) fn channel_view(channel: headwater_store::Channel) -> Channel {
    match channel {
        headwater_store::Channel::Maintenance => Channel::Maintenance,
        headwater_store::Channel::Test => Channel::Test,
        headwater_store::Channel::Production => Channel::Production,
    }
}

fn stored_channel(channel: Channel) -> headwater_store::Channel {
    match channel {
        Channel::Maintenance => headwater_store::Channel::Maintenance,
        Channel::Test => headwater_store::Channel::Test,
        Channel::Production => headwater_store::Channel::Production,
    }
}

pub(super) fn number_of(number: u64) -> Result<u32, BackendError> {
    let odd = || BackendError::new(ProblemKind::NotFound, format!("there is no version {number}"));
    u32::try_from(number).map_err(|_| odd())
}

fn pointer_of(promotion: &Promotion) -> Result<Pointer, BackendError> {
    Ok(Pointer {
        channel: stored_channel(promotion.channel),
        version: number_of(promotion.version)?,
        // Rounded up, so that it is never earlier than requested.
        at_s: promotion.at_ms.div_ceil(1000),
        author: promotion.author.clone(),
    })
}

pub(super) fn promotion_of(image: &str, pointer: Pointer) -> Promotion {
    Promotion {
        image: image.to_owned(),
        version: u64::from(pointer.version),
        channel: channel_view(pointer.channel),
        at_ms: pointer.at_s.saturating_mul(1000),
        author: pointer.author,
    }
}

/// The name of a source; if it is too long, its end.
pub(super) fn end_of(source: &str) -> String {
    let mut start = source.len().saturating_sub(headwater_store::NOTE_MAX_BYTES);
    while !source.is_char_boundary(start) {
        start += 1;
    }
    source.get(start..).unwrap_or_default().to_owned()
}

/// Converts an error of the store.
pub fn store_failed(error: StoreError) -> BackendError {
    let failed = BackendError::new(store_kind(error.kind()), error.to_string());
    if error.kind() == StoreErrorKind::Unknown { failed.unknown() } else { failed }
}

/// Converts an error of a retention root. A timeout because another caller removes versions says nothing about this
/// version.
fn hold_failed(error: StoreError) -> BackendError {
    match error.kind() {
        StoreErrorKind::Locked => BackendError::new(ProblemKind::Unavailable, error.to_string()),
        _ => store_failed(error),
    }
}

/// Converts an error of an image.
pub fn image_failed(error: ImageError) -> BackendError {
    let failed = BackendError::new(image_kind(error.kind()), error.to_string());
    if error.kind() == ImageErrorKind::Unknown { failed.unknown() } else { failed }
}

#[cfg(test)]
pub(super) mod tests;

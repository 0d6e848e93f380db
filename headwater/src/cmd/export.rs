//! `headwater export`: serves one volume over NBD, vhost-user, iSCSI or as a file in the foreground, without a
//! daemon; or one volume for each of many machines, over NBD, vhost-user or iSCSI.

use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use headwater_api::{CacheMode, CacheSettings, Problem, ProblemKind};
use headwater_block::{Device, blocking, size};
use headwater_image::Backing;
use headwater_store::{Access, ImageReference, StoreError, StoreErrorKind};
use headwater_vhost_user::Positions;
use headwater_volume::{
    DEFAULT_WEIGHT, LittleSpace, PersistentOptions, Volume, VolumeCounters, VolumeOptions,
};
use headwater_writecache::Host;
use rustix::process::configure_io_flusher_behavior;
use tokio::signal::unix::{SignalKind, signal};

use crate::adapters::disk_host::KnownStore;
use crate::adapters::disks::volume_mode;
use crate::adapters::sources;
use crate::cli::{AttachArgs, ExportArgs, LogFormat};
use crate::cmd::disks::Disks;
use crate::cmd::persistent::{self, Kept};
use crate::cmd::resume::Resume;
use crate::cmd::{attach, counters, fuse, image, iscsi, source_url};
use crate::data_dir::DataDir;
use crate::failure::invalid;
use crate::last_known::LastKnown;
use crate::limits::server::{Listening, Served};
use crate::signals::EndSignals;
use crate::streaming::{DiskState, Streamed, Streaming};
use crate::{limits, logging};

/// The cache for uncompressed chunks of an image, in addition to the write cache.
const CHUNK_CACHE_BYTES: u64 = 64 << 20;

/// How often the progress of copying an image is checked for output.
const COPY_SHOWN_EVERY: Duration = Duration::from_secs(1);

/// Serves until SIGINT or SIGTERM. Ready when it has printed a line for each front-end.
pub fn run(data_dir: impl Fn() -> anyhow::Result<DataDir>, mut args: ExportArgs) -> anyhow::Result<()> {
    // Set before threads are started, which inherit it. The kernel's writes to this device may be what frees memory,
    // so this process must not wait for them while it allocates memory.
    let is_in_block_path = args.attach.attach || args.fuse.fuse.is_some();
    let refused = is_in_block_path.then(|| configure_io_flusher_behavior(true)).and_then(Result::err);
    logging::to_stderr(&args.log, LogFormat::Text)?;
    if let Some(why) = refused {
        tracing::info!(%why, "this process may block on its own disk when the host is short of memory, because PR_SET_IO_FLUSHER failed");
    }
    take_url(&mut args)?;
    check_format(&args)?;
    check_machines(&args)?;
    check_persistent(&args)?;
    check_attach(&args)?;
    let cache = args.limits.settings(CacheSettings::default())?;
    check_ram(&args, &cache)?;
    let ram_bytes = args.caches.ram_bytes();
    let ram_bytes = ram_bytes
        .map_err(|why| Problem::new(ProblemKind::Invalid, why).advise("give a smaller --cache-ram"))?;
    // If the file cannot be written, this fails now instead of after hours. Nothing is counted yet, so there are no
    // machines in it.
    write_stats(&args, &[], None)?;
    let Base { device: base, id: base_id, files, image } = open_base(&args, &data_dir)?;
    if let Some(name) = &args.persistent {
        persistent::check_files(&files, &args.cache_dir, name, &base_id)?;
    }
    let persistent = match &args.persistent {
        None => None,
        Some(name) => {
            let (key, cache_dir) = (args.key_file.as_deref(), args.cache_dir.as_path());
            Some(persistent::options(name, key, cache_dir, base_id, &data_dir)?)
        }
    };
    let host = Host::start(ram_bytes).map_err(anyhow::Error::msg)?;
    let image_device = Arc::clone(&base);
    let mut options = VolumeOptions {
        name: String::new(),
        base,
        mode: volume_mode(cache.mode),
        ram_bytes: cache.ram_bytes,
        weight: DEFAULT_WEIGHT,
        buffering: args.caches.writing.buffering,
        little_space: LittleSpace::Refused,
        disk_bytes: cache.disk_bytes,
        cache_dir: args.cache_dir.clone(),
        pause_limit: args.caches.writing.pause_limit(),
        persistent,
    };
    let volumes: Vec<_> = (0..machines(&args))
        .map(|number| {
            options.name = volume_name(&args, number);
            Volume::open(&options, &host)
        })
        .collect::<Result<_, _>>()
        .with_context(|| format!("cannot open a volume over '{}'", args.source))?;
    let kept = args.persistent.as_ref().zip(volumes.first().and_then(|volume| volume.cache_id()));
    let kept = kept.map(|(name, id)| Kept::new(&args.cache_dir, name, base_id, id)).transpose()?;
    // The options contain the key of a persistent cache, which must not stay in memory while it is served.
    drop(options);
    let disks = Disks::new(volumes.clone(), &image_device, args.record.as_deref());
    let disks = disks.inspect_err(|_| remove_new(&volumes, kept.as_ref()))?;
    // Kernels before 5.14 identify the owner of an NBD device by the thread that connected it, so this thread must
    // stay.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .thread_keep_alive(Duration::from_secs(u32::MAX.into()))
        .build()
        .context("cannot start")?;
    let served = runtime.block_on(serve(&args, &disks, kept.as_ref(), image.as_ref()));
    served.and(disks.end_recording())
}

/// Removes the cache that was created for a start that failed, unless somebody wrote to it. Immediately, because
/// others may open it once it is closed.
fn remove_new(volumes: &[Arc<Volume>], kept: Option<&Kept>) {
    volumes.iter().for_each(|volume| volume.close());
    if let Some(kept) = kept
        && volumes.iter().all(|volume| volume.has_new_cache())
        && is_untouched(volumes)
        && let Err(error) = persistent::remove_new(&kept.dir)
    {
        tracing::warn!("cannot remove the unused cache {}: {error}", kept.dir.display());
    }
}

async fn serve(
    args: &ExportArgs,
    disks: &Disks,
    kept: Option<&Kept>,
    image: Option<&OpenImage>,
) -> anyhow::Result<()> {
    let volumes = disks.volumes.as_slice();
    let mut end = EndSignals::catch()?;
    let mut ask = signal(SignalKind::user_defined1()).context("cannot catch SIGUSR1")?;
    let nbd = args.nbd.serve(&args.source, &disks.devices).inspect_err(|_| remove_new(volumes, kept))?;
    let resume = kept.map(|kept| Resume::new(&kept.dir));
    // Removed by any server that resumes: its writes make the note outdated.
    let stood = resume.as_ref().map(Resume::take).transpose()?.flatten();
    let mut vhost_user = Vec::new();
    let served = async {
        let others = serve_others(args, &disks.devices, kept, stood.clone(), &mut vhost_user)?;
        let (attached, is_ended) = attach_until(args, kept, &disks.devices, image, &mut end).await?;
        anyhow::Ok((others, attached, is_ended))
    };
    let served = served.await.inspect_err(|_| {
        vhost_user.iter().for_each(headwater_vhost_user::Server::stop);
        let stands = || vhost_user.first().map(headwater_vhost_user::Server::positions);
        let stands = || stands().or_else(|| stood.filter(|_| is_untouched(volumes)));
        if let Err(error) = close(volumes, resume.as_ref(), stands) {
            tracing::error!("{error:#}");
        }
        remove_new(volumes, kept);
    })?;
    let (Others { iscsi, fuse }, attached, mut is_ended) = served;
    // Before anything announces this process, so that whoever finds it also finds its counters.
    write_stats(args, &counters_of(volumes), image).unwrap_or_else(|error| tracing::error!("{error:#}"));
    let limits = answer_limits(args, volumes, attached.as_ref());
    for uri in nbd.iter().flat_map(|nbd| nbd.uris()) {
        say_uri(args, &uri);
    }
    for vhost_user in &vhost_user {
        say_uri(args, &format!("vhost-user:{}", vhost_user.path().display()));
    }
    for url in iscsi.iter().flat_map(|iscsi| iscsi.urls()) {
        say_uri(args, &url);
    }
    if let Some(fuse) = &fuse {
        say_uri(args, &format!("fuse:{}", fuse.path().display()));
    }
    if let Some(attached) = attached.as_ref().filter(|_| !is_ended) {
        attach::explain(attached);
        say_uri(args, &format!("attached:{}", attached.path()));
    }
    if let Err(error) = sd_notify::notify(&[sd_notify::NotifyState::Ready]) {
        tracing::warn!("cannot tell the service manager that the disk is served: {error}");
    }
    let mut watch = CopyWatch::default();
    while !is_ended {
        tokio::select! {
            _ = end.next() => is_ended = true,
            // As with other file systems: unmounting ends it.
            () = fuse::unmounted(fuse.as_ref()) => is_ended = true,
            () = attach::gone(attached.as_ref()) => is_ended = true,
            () = tokio::time::sleep(COPY_SHOWN_EVERY), if image.is_some() => {
                image.into_iter().for_each(|image| watch.show(&image.streamed, args.json));
            }
            // A failed report must not end the disk of a machine.
            _ = ask.recv() => report(args, volumes, image).unwrap_or_else(|e| tracing::error!("{e:#}")),
        }
    }
    // Requests in flight may need a server that does not answer.
    let ending = image.map(|image| image.streaming.ending());
    drop(limits);
    // Before the volume closes: requests of machines are answered, and initiators are logged out.
    drop(iscsi);
    drop(fuse);
    let stopping = attached.map(attach::AttachedDisk::stop);
    // Before the volume closes: requests of the machine are answered, so that another server can resume.
    vhost_user.iter().for_each(headwater_vhost_user::Server::stop);
    // The volume refuses requests that wait for space; they go back into the ring for the next server.
    let stands = || vhost_user.first().map(headwater_vhost_user::Server::positions);
    let closed = close(volumes, resume.as_ref(), stands);
    drop((nbd, stopping));
    drop(ending);
    closed.and(report(args, volumes, image))
}

/// Serves `headwater cache`, which shows and changes the limits, if a socket can be created for it.
fn answer_limits(
    args: &ExportArgs,
    volumes: &[Arc<Volume>],
    attached: Option<&attach::AttachedDisk>,
) -> Option<Listening> {
    let named = volumes.iter().enumerate();
    let served = Served {
        source: args.given.clone(),
        devices: attached.map(attach::AttachedDisk::names).unwrap_or_default(),
        mode: args.limits.mode(),
        caches: args.caches.clone(),
        volumes: named.map(|(number, volume)| (volume_name(args, number), Arc::clone(volume))).collect(),
    };
    limits::server::listen(served)
        .inspect_err(|error| {
            tracing::warn!(
                "'headwater cache' will not find this process, so its limits cannot be changed: {error}"
            );
        })
        .ok()
}

/// The front-ends of one disk other than NBD, vhost-user and the kernel's.
struct Others {
    iscsi: Option<iscsi::Running>,
    fuse: Option<fuse::Mounted>,
}

/// Starts all front-ends except NBD and the kernel's. After a failure, servers in `vhost_user` may already have had a
/// machine.
fn serve_others(
    args: &ExportArgs,
    devices: &[Arc<dyn Device>],
    kept: Option<&Kept>,
    mut stood: Option<Positions>,
    vhost_user: &mut Vec<headwater_vhost_user::Server>,
) -> anyhow::Result<Others> {
    for (path, device) in args.vhost_user.iter().zip(devices) {
        vhost_user.push(serve_vhost_user(args, path, device, stood.take())?);
    }
    let device = devices.first().context("nothing to serve")?;
    let iscsi = args.iscsi.serve(&args.source, kept, devices)?;
    let fuse = args.fuse.serve(&args.source, Arc::clone(device))?;
    Ok(Others { iscsi, fuse })
}

/// Attaches the device, and returns whether the program was asked to end meanwhile: the kernel reads partition tables
/// first, and the end must not wait for servers that do not answer these reads.
async fn attach_until(
    args: &ExportArgs,
    kept: Option<&Kept>,
    devices: &[Arc<dyn Device>],
    image: Option<&OpenImage>,
    end: &mut EndSignals,
) -> anyhow::Result<(Option<attach::AttachedDisk>, bool)> {
    if !args.attach.attach {
        return Ok((None, false));
    }
    let (attach, given, kept) = (args.attach.clone(), args.given.clone(), kept.cloned());
    let device = Arc::clone(devices.first().context("nothing to attach")?);
    let mut attaching = tokio::task::spawn_blocking(move || attach.serve(&given, kept.as_ref(), &device));
    tokio::select! {
        attached = &mut attaching => return Ok((attached??, false)),
        _ = end.next() => {}
    }
    let _ending = image.map(|image| image.streaming.ending());
    Ok((attaching.await??, true))
}

/// Closes the volumes, and then stores the positions of the machine's ring for the next export. Fails unless
/// everything that was answered is durable.
fn close(
    volumes: &[Arc<Volume>],
    resume: Option<&Resume>,
    stands: impl FnOnce() -> Option<Positions>,
) -> anyhow::Result<()> {
    // Writes most of the data while NBD clients may still write; later writes fail. The close reports errors.
    for volume in volumes {
        let _ = blocking::flush(&**volume);
    }
    // Before NBD ends, so that requests that wait for space do not delay it.
    let closed = volumes.iter().map(|volume| volume.try_close()).fold(Ok(()), Result::and);
    let stands = resume.and_then(|resume| Some((resume, stands()?)));
    let cannot_go_on =
        "a machine that still runs over vhost-user cannot continue with the next export: restart it";
    if let Err(error) = closed {
        if stands.is_some() {
            tracing::error!("{cannot_go_on}");
        }
        return Err(error).context("data written since the last flush may be lost");
    }
    if let Some((resume, stands)) = stands {
        resume.leave(&stands).unwrap_or_else(|e| tracing::error!("{cannot_go_on}: {e:#}"));
    }
    Ok(())
}

/// Whether nothing was written. A write that failed may have stored a part of its data.
fn is_untouched(volumes: &[Arc<Volume>]) -> bool {
    let mut counts = volumes.iter().map(|volume| volume.counters());
    counts.all(|counts| counts.write_ops + counts.discard_ops + counts.cache.refused_writes == 0)
}

fn serve_vhost_user(
    args: &ExportArgs,
    path: &Path,
    device: &Arc<dyn Device>,
    stood: Option<Positions>,
) -> anyhow::Result<headwater_vhost_user::Server> {
    // Machines share the source, so their sockets identify them.
    let name = if machines(args) == 1 { args.source.clone() } else { path.display().to_string() };
    let options = headwater_vhost_user::Options {
        name,
        serial: args.serial.clone(),
        // A persistent cache survives a server that ends in order; any other cache starts empty.
        resume: stood,
        recovered: false,
        // The caller of the program decides which memory the front-end uses.
        sealed_memory: false,
        limits: headwater_vhost_user::Limits::default(),
    };
    headwater_vhost_user::Server::bind(path, Arc::clone(device), options)
        .with_context(|| format!("cannot serve '{}'", args.source))
}

fn check_persistent(args: &ExportArgs) -> anyhow::Result<()> {
    let Some(name) = &args.persistent else { return Ok(()) };
    if args.limits.mode() == CacheMode::Ram {
        return Err(invalid("a persistent cache needs a disk: give --cache ram+disk or --cache disk"));
    }
    // Check the name before anything with it is created or searched.
    Ok(PersistentOptions::check_name(name)?)
}

/// Fails for options of a block device if none is attached, because --write-through would promise durability without
/// effect.
fn check_attach(args: &ExportArgs) -> anyhow::Result<()> {
    let AttachArgs { attach, device, via, write_through, queues } = &args.attach;
    if *attach {
        return Ok(());
    }
    let given = [
        ("--device", device.is_some()),
        ("--via", via.is_some()),
        ("--write-through", *write_through),
        ("--queues", *queues != 1),
    ];
    match given.iter().find(|(_, is_given)| *is_given) {
        Some((option, _)) => {
            Err(invalid(format!("{option} is an option of a block device: give --attach too")))
        }
        None => Ok(()),
    }
}

/// Fails for a format without effect, because the user may rely on it.
fn check_format(args: &ExportArgs) -> anyhow::Result<()> {
    let source = &args.source;
    let is_file = args.from.is_none() && !source.starts_with("null:") && image::is_path(source);
    if args.format.is_none() || is_file {
        return Ok(());
    }
    Err(invalid(format!("--format is for a file, and '{}' is not a file: leave it out", args.given)))
}

fn check_ram(args: &ExportArgs, cache: &CacheSettings) -> anyhow::Result<()> {
    args.caches.check_count(machines(args)).map_err(invalid)?;
    if cache.mode == CacheMode::Disk {
        return Ok(());
    }
    args.caches.check_limits(std::iter::repeat_n(cache.ram_bytes, machines(args))).map_err(invalid)
}

/// Splits a URL into the image and its location.
fn take_url(args: &mut ExportArgs) -> anyhow::Result<()> {
    args.given.clone_from(&args.source);
    let Some((store, image)) = source_url::split(&args.source)? else { return Ok(()) };
    if let Some(from) = &args.from {
        let source = &args.source;
        return Err(invalid(format!(
            "'{source}' says where the image is, and so does --from {from}: give one of them"
        )));
    }
    (args.from, args.source) = (Some(store), image);
    Ok(())
}

/// The number of disks that are served.
fn machines(args: &ExportArgs) -> usize {
    args.vhost_user.len().max(args.iscsi.iscsi_target.len()).max(args.nbd.nbd_export.len()).max(1)
}

fn check_machines(args: &ExportArgs) -> anyhow::Result<()> {
    if machines(args) == 1 {
        return Ok(());
    }
    let (sockets, targets, exports) =
        (args.vhost_user.len(), args.iscsi.iscsi_target.len(), args.nbd.nbd_export.len());
    let many = match (sockets, targets) {
        (2.., _) => "--vhost-user",
        (_, 2..) => "--iscsi-target",
        _ => "--nbd-export",
    };
    let others = [
        ("--nbd", many != "--nbd-export" && args.nbd.nbd.is_some()),
        ("--nbd-export", many != "--nbd-export" && exports > 0),
        ("--vhost-user", many != "--vhost-user" && sockets > 0),
        ("--iscsi", many != "--iscsi-target" && args.iscsi.iscsi.is_some()),
        ("--fuse", args.fuse.fuse.is_some()),
        ("--attach", args.attach.attach),
        ("--persistent", args.persistent.is_some()),
    ];
    let other = others.into_iter().find_map(|(name, asked)| asked.then_some(name));
    if let Some(other) = other {
        return Err(invalid(format!(
            "{many} was given {} times, which serves a disk for each of several machines, but {other} is for one \
             disk: start an export of its own for that",
            machines(args)
        )));
    }
    check_each_once("--iscsi-target", "target", &args.iscsi.iscsi_target)?;
    check_each_once("--nbd-export", "export", &args.nbd.nbd_export)
}

fn check_each_once<T: PartialEq + Display>(flag: &str, what: &str, names: &[T]) -> anyhow::Result<()> {
    let twice = names.iter().enumerate().find(|(at, name)| names.iter().take(*at).any(|n| n == *name));
    match twice {
        None => Ok(()),
        Some((_, name)) => {
            Err(invalid(format!("{flag} {name} was given twice: give each machine its own {what}")))
        }
    }
}

/// The device below the write cache.
struct Base {
    device: Arc<dyn Device>,
    id: [u8; 32],
    /// The files of the disk, if it is a file.
    files: Vec<PathBuf>,
    image: Option<OpenImage>,
}

/// A version of an image that is open, and the means to read it.
struct OpenImage {
    streaming: Streaming,
    streamed: Streamed,
}

fn open_base(args: &ExportArgs, data_dir: impl FnOnce() -> anyhow::Result<DataDir>) -> anyhow::Result<Base> {
    let source = args.source.as_str();
    if args.from.is_none() {
        if let Some(text) = source.strip_prefix("null:") {
            let bytes = size::parse(text).map_err(invalid)?;
            args.stream.warn_of_no_use("an empty disk");
            let device = headwater_image::null_device(bytes)?;
            let id = persistent::null_id(bytes);
            return Ok(Base { device, id, files: Vec::new(), image: None });
        }
        if image::is_path(source) {
            args.stream.warn_of_no_use("the file");
            let backing = if args.backing { Backing::Anywhere } else { Backing::Beside };
            let format = args.format.map(sources::file_format);
            let (device, files) = headwater_image::open_chain(Path::new(source), format, backing)?;
            let size_bytes = device.geometry().size_bytes;
            let id = persistent::file_id(&files, size_bytes, args.format)?;
            return Ok(Base { device, id, files, image: None });
        }
    }
    let failed = || match &args.from {
        Some(from) => format!("cannot export '{source}' from {from}"),
        None => format!("cannot export '{source}', which is not a file here and was looked up as an image"),
    };
    let reference: ImageReference = source.parse().with_context(failed)?;
    let name = match &args.from {
        Some(from) => from.clone(),
        None => data_dir()?.store().display().to_string(),
    };
    // Outside of the context, because its errors name the cache and not the source.
    let disk = args.stream.open_disk()?;
    let last_known = LastKnown::new(&name, disk.clone().map(|disk| disk as Arc<dyn KnownStore>));
    let store = last_known.open(Access::Read, &args.credentials).with_context(failed)?;
    let image = last_known.look_up(&*store, &reference.name).with_context(failed)?;
    let image = image.ok_or_else(|| {
        let why = format!("the store {name} has no image '{}'", reference.name);
        StoreError::new(StoreErrorKind::NotFound, why)
    });
    let image = image.with_context(failed)?;
    let version = image.select(&reference.selector).with_context(failed)?;
    let ram_bytes = (!store.is_remote()).then_some(CHUNK_CACHE_BYTES);
    let streaming = Streaming::new(store, &args.stream, disk, ram_bytes, None);
    let kept = args.persistent.as_ref().filter(|name| persistent::is_there(&args.cache_dir, name));
    let above = if kept.is_some() { DiskState::Written } else { DiskState::Empty };
    let streamed = streaming.open(version.manifest, above).with_context(failed)?;
    // Nobody reports when the guest has booted, so everything that it reads counts as its boot.
    streamed.has_booted();
    let device = Arc::clone(&streamed.reader) as Arc<dyn Device>;
    let id = streamed.reader.id().0;
    Ok(Base { device, id, files: Vec::new(), image: Some(OpenImage { streaming, streamed }) })
}

/// Prints the progress of copying the image to this host.
#[derive(Default)]
struct CopyWatch {
    shown_percent: Option<u64>,
}

impl CopyWatch {
    /// Prints the progress if it has changed: as a line of JSON for programs, at each percent.
    fn show(&mut self, image: &Streamed, json: bool) {
        let Some(copied) = image.copied() else { return };
        let percent = if copied.is_over { 100 } else { copied.done_bytes * 100 / copied.total_bytes.max(1) };
        if self.shown_percent == Some(percent) {
            return;
        }
        self.shown_percent = Some(percent);
        if json {
            let (copied_bytes, to_copy_bytes) = (copied.done_bytes, copied.total_bytes);
            let is_over = copied.is_over;
            let line = serde_json::json!({ "copied_bytes": copied_bytes, "to_copy_bytes": to_copy_bytes, "is_over": is_over });
            return say(&format!("{line}\n"));
        }
        let (done, total) = (size::format(copied.done_bytes), size::format(copied.total_bytes));
        say(&if copied.is_over && copied.done_bytes == copied.total_bytes {
            format!("the image is copied to this host: {total}; no server is needed now\n")
        } else if copied.is_over {
            format!(
                "the image was not copied completely to this host ({done} of {total}): a server is still needed\n"
            )
        } else {
            format!("copying the image to this host: {done} of {total} ({percent} %)\n")
        });
    }
}

fn report(args: &ExportArgs, volumes: &[Arc<Volume>], image: Option<&OpenImage>) -> anyhow::Result<()> {
    let counters = counters_of(volumes);
    let streaming = image.map(|image| image.streaming.counters());
    if args.json {
        say(&format!("{}\n", counters::stats_json(&counters, streaming)?));
    } else {
        for (number, counters) in counters.iter().enumerate() {
            if volumes.len() > 1 {
                say(&format!("{}\n", machine_name(args, number)));
            }
            say(&counters::table(counters));
        }
        streaming.iter().for_each(|streaming| say(&counters::image_table(streaming)));
    }
    write_stats(args, &counters, image)
}

fn counters_of(volumes: &[Arc<Volume>]) -> Vec<VolumeCounters> {
    volumes.iter().map(|volume| volume.counters()).collect()
}

/// Writes the counters to the file of `--stats`, if there is one.
fn write_stats(
    args: &ExportArgs,
    counters: &[VolumeCounters],
    image: Option<&OpenImage>,
) -> anyhow::Result<()> {
    let Some(file) = &args.stats else { return Ok(()) };
    let machines: Vec<_> = (0..machines(args)).map(|number| volume_name(args, number)).collect();
    let copied = image.and_then(|image| image.streamed.copied());
    let whose = counters::Owners { machines: &machines, mode: args.limits.mode(), copied };
    counters::write_stats(file, &whose, counters, image.map(|image| image.streaming.counters()))
}

/// The name of a machine within its export.
fn machine_name(args: &ExportArgs, number: usize) -> String {
    if let Some(path) = args.vhost_user.get(number) {
        format!("vhost-user:{}", path.display())
    } else if let Some(target) = args.iscsi.iscsi_target.get(number) {
        format!("iscsi:{target}")
    } else {
        args.nbd.nbd_export.get(number).map_or_else(String::new, |export| format!("nbd:{export}"))
    }
}

/// The name of a volume in the log. Machines share the source.
fn volume_name(args: &ExportArgs, number: usize) -> String {
    if machines(args) == 1 { args.source.clone() } else { machine_name(args, number) }
}

/// Prints the address of a served disk on a line.
fn say_uri(args: &ExportArgs, uri: &str) {
    say(&format!("{}\n", crate::show::uri_text(uri, args.json)));
}

/// Prints to standard output. If its reader is gone or blocked, serving continues.
fn say(text: &str) {
    logging::aloud(text);
}

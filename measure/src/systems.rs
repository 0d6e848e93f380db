//! Starts and stops the systems under test: Headwater and its peers.

use std::io::{BufRead, BufReader, Read};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process};

use crate::fio::Target;
use crate::{Plan, interrupt};

const START_TIMEOUT: Duration = Duration::from_secs(30);
const STOP_TIMEOUT: Duration = Duration::from_secs(20);

/// Settings of Headwater's write cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cache {
    /// `ram`, `ram+disk` or `disk`.
    pub mode: &'static str,
    /// RAM limit; `None`: the default of the mode.
    pub ram_bytes: Option<u64>,
    /// Limit of the overflow disk.
    pub disk_bytes: u64,
}

/// Name of Headwater with a working set that fits in RAM, in a case whose set does not fit.
pub const HEADWATER_FITS: &str = "headwater, set fits";

/// Name of Headwater with block-aligned requests, in a case with unaligned requests.
pub const HEADWATER_ALIGNED: &str = "headwater, aligned";

/// A server of a disk, or a raw disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum System {
    /// `headwater export --nbd`.
    Headwater(Cache),
    /// `headwater export --vhost-user`.
    HeadwaterVhost(Cache),
    /// `headwater export` over NBD with a working set that fits in RAM, in a case whose set does not fit.
    HeadwaterFits(Cache),
    /// `headwater export` over NBD with block-aligned requests, in a case with unaligned requests.
    HeadwaterAligned(Cache),
    /// `headwater export --persistent` over NBD.
    HeadwaterKept(Cache),
    /// nbdkit's null plugin, which discards writes: the limit of fio's NBD client.
    NbdkitNull,
    /// nbdkit's sparse array in memory.
    NbdkitMemory,
    /// nbdkit's overlay of changed blocks above a file.
    NbdkitCow,
    /// qemu-nbd with a qcow2 overlay, through the page cache.
    QemuNbdWriteback,
    /// qemu-nbd with a qcow2 overlay, without the page cache.
    QemuNbdDirect,
    /// qemu-storage-daemon's null device over vhost-user, which discards writes and copies no data: the limit of the
    /// vhost-user path.
    QsdNull,
    /// qemu-storage-daemon with a qcow2 overlay through the page cache, over vhost-user.
    QsdQcow2,
    /// qemu-storage-daemon with a raw file in memory (tmpfs), over vhost-user.
    QsdMemory,
    /// A file that fio writes itself, without the page cache.
    RawDisk,
}

impl System {
    /// The name in results.
    pub fn name(self) -> &'static str {
        match self {
            System::Headwater(_) | System::HeadwaterVhost(_) | System::HeadwaterKept(_) => "headwater",
            System::HeadwaterAligned(_) => HEADWATER_ALIGNED,
            System::HeadwaterFits(_) => HEADWATER_FITS,
            System::NbdkitNull => "nbdkit null",
            System::NbdkitMemory => "nbdkit memory",
            System::NbdkitCow => "nbdkit file+cow",
            System::QemuNbdWriteback => "qemu-nbd qcow2 writeback",
            System::QemuNbdDirect => "qemu-nbd qcow2 direct",
            System::QsdNull => "storage-daemon null-co",
            System::QsdQcow2 => "storage-daemon qcow2",
            System::QsdMemory => "storage-daemon raw, tmpfs",
            System::RawDisk => "raw disk",
        }
    }

    /// The settings of the write cache, if the system is Headwater.
    pub fn cache(self) -> Option<Cache> {
        match self {
            System::Headwater(cache)
            | System::HeadwaterFits(cache)
            | System::HeadwaterVhost(cache)
            | System::HeadwaterAligned(cache)
            | System::HeadwaterKept(cache) => Some(cache),
            _ => None,
        }
    }

    fn is_vhost_user(self) -> bool {
        matches!(self, System::HeadwaterVhost(_) | System::QsdNull | System::QsdQcow2 | System::QsdMemory)
    }

    /// Starts the system with a disk of `device_bytes`. It is ready for requests when this returns.
    pub fn start(self, plan: &Plan, device_bytes: u64) -> Result<Running> {
        let name = self.name();
        if self == System::RawDisk {
            let path = plan.work_dir.join("raw.img");
            let is_filled = path.exists();
            make_file(&path, device_bytes, true)?;
            return Ok(Running {
                target: Target::File(path),
                process: None,
                folder: None,
                is_filled,
                memory: None,
            });
        }
        let folder = plan.work_dir.join(name.replace([' ', '+', ','], "-"));
        std::fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
        let socket = plan.sockets.join(format!("{}.sock", name.replace([' ', '+', ','], "-")));
        // A socket that a killed process left would prevent the bind.
        let _ = std::fs::remove_file(&socket);
        let memory = (self == System::QsdMemory).then(|| memory_file(device_bytes)).transpose()?;
        let mut command = self.command(plan, &folder, &socket, device_bytes)?;
        if let Some(file) = &memory {
            // The path leads through this process, so the file needs no name and vanishes with the process.
            let path = format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd());
            storage_daemon(&mut command, &socket, &format!("driver=file,filename={path}"));
        }
        let process = Process::start(&mut command, name)?;
        // `Running` owns the process from here on, so an error below ends the process and removes its files.
        let target = if self.is_vhost_user() {
            Target::VhostUser(socket.clone())
        } else {
            Target::Nbd(socket.clone())
        };
        let mut running =
            Running { target, process: Some(process), folder: Some(folder), is_filled: false, memory };
        running.wait_until_ready(&socket)?;
        Ok(running)
    }

    fn command(self, plan: &Plan, folder: &Path, socket: &Path, device_bytes: u64) -> Result<Command> {
        if let Some(cache) = self.cache() {
            let mut command = Command::new(&plan.headwater);
            self.export(cache, &mut command, (folder, socket), device_bytes)?;
            return Ok(command);
        }
        let mut command = match self {
            System::QsdNull | System::QsdQcow2 | System::QsdMemory => Command::new("qemu-storage-daemon"),
            System::NbdkitNull | System::NbdkitMemory | System::NbdkitCow => Command::new("nbdkit"),
            System::QemuNbdWriteback | System::QemuNbdDirect => Command::new("qemu-nbd"),
            _ => bail!("{} needs no server process", self.name()),
        };
        match self {
            System::NbdkitNull | System::NbdkitMemory => {
                let plugin = if self == System::NbdkitNull { "null" } else { "memory" };
                command.args(["--exit-with-parent", "-U"]).arg(socket);
                command.arg(plugin).arg(format!("size={device_bytes}"));
            }
            System::NbdkitCow => {
                let base = folder.join("base.raw");
                make_file(&base, device_bytes, false)?;
                command.args(["--exit-with-parent", "--filter=cow", "-U"]).arg(socket);
                command.arg("file").arg(base.canonicalize()?);
                // The directory of the overlay.
                command.env("TMPDIR", folder.canonicalize()?);
            }
            System::QemuNbdWriteback | System::QemuNbdDirect => {
                let overlay = qcow2_overlay(folder, device_bytes)?;
                let cache: &[&str] = match self {
                    System::QemuNbdWriteback => &["--cache=writeback"],
                    _ => &["--cache=none", "--aio=native"],
                };
                command.args(["-f", "qcow2", "-t", "-e", "0"]).args(cache).arg("-k").arg(socket).arg(overlay);
            }
            System::QsdNull => {
                storage_daemon(&mut command, socket, &format!("driver=null-co,size={device_bytes}"))
            }
            System::QsdQcow2 => {
                let overlay = qcow2_overlay(folder, device_bytes)?;
                let file = format!("file.driver=file,file.filename={}", overlay.display());
                storage_daemon(&mut command, socket, &format!("driver=qcow2,{file},discard=unmap"));
            }
            _ => {}
        }
        Ok(command)
    }

    /// The arguments of `headwater export`.
    fn export(
        self,
        cache: Cache,
        command: &mut Command,
        (folder, socket): (&Path, &Path),
        device_bytes: u64,
    ) -> Result<()> {
        command.args(["export", &format!("null:{device_bytes}"), "--cache", cache.mode]);
        command.args(["--disk", &cache.disk_bytes.to_string()]).arg("--cache-dir").arg(folder);
        if let Some(ram_bytes) = cache.ram_bytes {
            command.args(["--ram", &ram_bytes.to_string()]);
        }
        if let System::HeadwaterKept(_) = self {
            let keys = folder.join("keys");
            std::fs::create_dir_all(&keys)?;
            command.args(["--persistent", "measured"]).arg("--key-file").arg(keys.join("measured"));
        }
        match self {
            System::HeadwaterVhost(_) => command.arg("--vhost-user").arg(socket),
            _ => command.arg("--nbd").arg(format!("unix:{}", socket.display())),
        };
        Ok(())
    }
}

/// A disk with an I/O thread that polls for QEMU's default time.
fn storage_daemon(command: &mut Command, socket: &Path, disk: &str) {
    let export = format!(
        "type=vhost-user-blk,id=export,node-name=disk,writable=on,num-queues=1,iothread=thread,\
         addr.type=unix,addr.path={}",
        socket.display()
    );
    command.args(["--object", "iothread,id=thread,poll-max-ns=32768"]);
    command.args(["--blockdev", &format!("{disk},node-name=disk")]).args(["--export", &export]);
}

pub fn make_file(path: &Path, bytes: u64, is_allocated: bool) -> Result<()> {
    let open = std::fs::OpenOptions::new().create(true).truncate(false).write(true).open(path);
    let made = open.and_then(|file| {
        if is_allocated {
            rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, bytes)?;
        }
        file.set_len(bytes)
    });
    made.with_context(|| format!("cannot make {} of {bytes} bytes", path.display()))
}

/// A sparse file in the kernel's tmpfs, limited only by memory; no mount is needed.
fn memory_file(bytes: u64) -> Result<OwnedFd> {
    let made = rustix::fs::memfd_create("headwater-measure", rustix::fs::MemfdFlags::CLOEXEC);
    let file = made.and_then(|file| rustix::fs::ftruncate(&file, bytes).map(|()| file));
    file.with_context(|| format!("cannot make a file of {bytes} bytes in memory"))
}

fn qcow2_overlay(folder: &Path, device_bytes: u64) -> Result<PathBuf> {
    let base = folder.join("base.raw");
    make_file(&base, device_bytes, false)?;
    let overlay = folder.join("overlay.qcow2");
    let output = Command::new("qemu-img")
        .args(["create", "-q", "-f", "qcow2", "-F", "raw", "-b"])
        .arg(base.canonicalize()?)
        .arg(&overlay)
        .output()
        .context("cannot run qemu-img; apt-get install qemu-utils")?;
    if !output.status.success() {
        bail!("qemu-img create failed: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(overlay)
}

/// A system that is ready for requests. Dropping it ends its process and removes its files.
pub struct Running {
    /// The device under test.
    pub target: Target,
    /// The server process; `None` for the raw disk.
    pub process: Option<Process>,
    /// Whether an earlier case has written the working set.
    pub is_filled: bool,
    folder: Option<PathBuf>,
    /// The disk, if it is in memory. It is freed when this and the process have closed it.
    #[expect(dead_code, reason = "held for as long as it is open")]
    memory: Option<OwnedFd>,
}

impl Running {
    fn wait_until_ready(&mut self, socket: &Path) -> Result<()> {
        let Some(process) = &mut self.process else { return Ok(()) };
        let start = Instant::now();
        while UnixStream::connect(socket).is_err() {
            if let Some(status) = process.child.try_wait()? {
                bail!("{} ended ({status}) before it was ready: {}", process.name, process.last_line());
            }
            if start.elapsed() > START_TIMEOUT {
                bail!(
                    "{} was not ready within {} s: {}",
                    process.name,
                    START_TIMEOUT.as_secs(),
                    process.last_line()
                );
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        drop(self.process.take());
        if let Some(folder) = self.folder.take()
            && let Err(error) = std::fs::remove_dir_all(&folder)
        {
            eprintln!("cannot remove {}: {error}", folder.display());
        }
    }
}

/// A process that is ended when dropped: SIGTERM, then SIGKILL after a timeout.
pub struct Process {
    name: &'static str,
    child: Child,
    output: std::sync::Arc<std::sync::Mutex<Vec<String>>>,
}

/// Creates a directory for a daemon's data. The daemon refuses a directory that other users can write to.
pub fn own_dir(dir: &Path) -> std::io::Result<()> {
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(dir)
}

impl Process {
    /// Starts a process. Its output is kept for error messages.
    pub fn start(command: &mut Command, name: &'static str) -> Result<Self> {
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .with_context(|| format!("cannot start {name} ({})", command.get_program().display()))?;
        interrupt::register(child.id());
        let output = std::sync::Arc::default();
        if let Some(stdout) = child.stdout.take() {
            keep_lines(stdout, &output);
        }
        if let Some(stderr) = child.stderr.take() {
            keep_lines(stderr, &output);
        }
        Ok(Self { name, child, output })
    }

    /// Its name in messages.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Its PID.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Waits until the process has printed a line that contains `part`, and returns the line.
    pub fn wait_for_output(&mut self, part: &str, limit: Duration) -> Result<String> {
        let start = Instant::now();
        loop {
            let said = {
                let lines = self.output.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
                lines.iter().find(|line| line.contains(part)).cloned()
            };
            if let Some(line) = said {
                return Ok(line);
            }
            if let Some(status) = self.child.try_wait()? {
                bail!("{} ended ({status}) before it printed '{part}': {}", self.name, self.last_line());
            }
            if start.elapsed() > limit {
                let limit_s = limit.as_secs();
                bail!(
                    "{} did not print '{part}' within {limit_s} s; its last line: {}",
                    self.name,
                    self.last_line()
                );
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Sends a signal to the process.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        let pid =
            i32::try_from(self.child.id()).ok().and_then(Pid::from_raw).context("the process has no PID")?;
        kill_process(pid, signal).with_context(|| format!("cannot send a signal to {}", self.name))
    }

    /// The last line that the process printed.
    pub fn last_line(&self) -> String {
        // The pipes may still contain its last output.
        std::thread::sleep(Duration::from_millis(100));
        let lines = self.output.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        lines.last().cloned().unwrap_or_else(|| "it printed nothing".into())
    }
}

/// Reads until the end, so that the process never blocks on a full pipe. Keeps the last lines.
fn keep_lines(from: impl Read + Send + 'static, into: &std::sync::Arc<std::sync::Mutex<Vec<String>>>) {
    const KEPT_LINES: usize = 20;
    let into = into.clone();
    std::thread::spawn(move || {
        for line in BufReader::new(from).lines().map_while(std::result::Result::ok) {
            let mut lines = into.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            if lines.len() == KEPT_LINES {
                lines.remove(0);
            }
            lines.push(line);
        }
    });
}

impl Drop for Process {
    fn drop(&mut self) {
        let pid = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw);
        // The process was not waited for yet, so its PID cannot belong to another process.
        let _ = pid.map(|pid| kill_process(pid, Signal::TERM));
        let start = Instant::now();
        while matches!(self.child.try_wait(), Ok(None)) {
            if start.elapsed() > STOP_TIMEOUT {
                eprintln!("{} did not end {} s after SIGTERM; killing it", self.name, STOP_TIMEOUT.as_secs());
                let _ = self.child.kill();
                let _ = self.child.wait();
                break;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        interrupt::unregister(self.child.id());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_ended_and_its_last_words_are_kept() {
        let mut command = Command::new("sh");
        command.args(["-c", "echo first; echo last; exec sleep 60"]);
        let process = Process::start(&mut command, "sh").unwrap();
        let pid = process.pid();
        let words = std::fmt::from_fn(|f| write!(f, "its last words: {}", process.last_line()));
        headwater_testkit::wait_until(words, || process.last_line() == "last");
        drop(process);
        assert!(!Path::new(&format!("/proc/{pid}")).exists());
    }

    #[test]
    fn a_program_that_is_missing_is_named() {
        let error = Process::start(&mut Command::new("no-such-program"), "peer").err().unwrap();
        assert!(error.to_string().contains("no-such-program"), "{error}");
    }
}

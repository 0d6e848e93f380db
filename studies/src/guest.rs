//! Runs a real guest under QEMU whose disk is served by `headwater export`. Records the phases of the guest and the
//! counters of the export.
//!
//! ```text
//!   QEMU --vhost-user--> headwater export IMAGE --record --stats --> overflow
//!    |  agent: the phases' scripts          |  SIGUSR1: counters, each interval
//!    +------------------ this program ------+
//! ```
//!
//! QEMU, the export and their files are gone when a run ends, fails or is interrupted. If this program is killed with
//! SIGKILL, files can stay in the work directory.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, Result, anyhow, bail};
use headwater_qemu::{
    Acceleration, Disk, Display, Exec, Firmware, Guest, GuestSpec, Network, OnReboot, probe_acceleration,
};
use headwater_recorder::Reader;
use rustix::process::{Pid, Signal, kill_process};
use serde::Serialize;
use serde_json::Value;
use uuid::Uuid;

use crate::machine::installed_memory_bytes;
use crate::series::Counts;
use crate::started::{Directory, Started, is_installed};

/// Memory of the guest.
pub const MEMORY_BYTES: u64 = 768 << 20;

/// Timeout for the boot of an emulated guest on a busy host.
const BOOT_TIMEOUT: Duration = Duration::from_secs(900);

/// Timeout for one phase.
const PHASE_TIMEOUT: Duration = Duration::from_secs(3600);

/// Timeout for the export to start, to answer, and to end.
const EXPORT_TIMEOUT: Duration = Duration::from_secs(60);

/// The work of the guest after its boot.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Work {
    /// How many times files are copied and deleted.
    pub segments: u32,
    /// Files that are copied in each segment.
    pub files: u32,
    /// Length of each file, in bytes.
    pub file_bytes: u64,
    /// Seconds of work between copying and deleting.
    pub work_s: u32,
}

/// Creates the file that is copied, in memory, so that reading it causes no disk requests. It is random, so it is
/// incompressible.
const PREPARE: &str = "set -e\nhead -c @FILE_BYTES@ /dev/urandom >/dev/shm/copied\n";

/// Logon: copies a profile.
const LOGON: &str = "set -e
mkdir -p /root/profile
cp -a /etc /usr/lib/systemd /root/profile/
sync
";

/// Segment: copies files, saves documents (each as a new file that replaces the old one), packs an archive, and
/// deletes the copies.
const SEGMENT: &str = "set -e
mkdir -p /var/tmp/copies /var/tmp/desk
i=0
while [ $i -lt @FILES@ ]; do
    i=$((i + 1))
    cp /dev/shm/copied /var/tmp/copies/$i
done
sync
end=$(($(date +%s) + @WORK_S@))
n=0
while [ $(date +%s) -lt $end ]; do
    n=$((n + 1))
    head -c 36864 /usr/bin/dpkg >/var/tmp/desk/new
    date >>/var/tmp/desk/new
    sync /var/tmp/desk/new
    mv /var/tmp/desk/new /var/tmp/desk/document.$((n % 50))
    sleep 0.5
done
tar -cf - /etc 2>/dev/null | gzip -9 >/var/tmp/desk/archive
sync
rm -r /var/tmp/copies
# Blocks are free to be trimmed when the journal has the deletion.
sync
fstrim /
";

impl Work {
    fn script(&self, script: &str) -> String {
        script
            .replace("@FILES@", &self.files.to_string())
            .replace("@FILE_BYTES@", &self.file_bytes.to_string())
            .replace("@WORK_S@", &self.work_s.to_string())
    }
}

/// The parameters of a run.
#[derive(Clone, Debug)]
pub struct Options<'a> {
    /// The guest's image.
    pub image: &'a Path,
    /// The path of the program `headwater`.
    pub program: &'a Path,
    /// The directory of the overflow.
    pub dir: &'a Path,
    /// The RAM limit. `None`: a cache on disk.
    pub ram_bytes: Option<u64>,
    /// The limit of the overflow, in bytes.
    pub disk_bytes: u64,
    /// The interval between two samples of the counters.
    pub interval: Duration,
    /// The work of the guest.
    pub work: Work,
}

/// A phase of a guest's run, in seconds since the recording began.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Phase {
    /// Its name: `boot`, `logon` or `segment N`.
    pub name: String,
    /// The time of its beginning.
    pub from_s: f64,
    /// The time of its end.
    pub to_s: f64,
}

/// A sample of the export's counters.
#[derive(Clone, Copy, Debug, Default)]
pub struct CounterSample {
    /// Seconds since the recording began.
    pub at_s: f64,
    /// Counts of requests, and of operations of the overflow disk.
    pub counts: Counts,
    /// Blocks read from RAM, compressed or not.
    pub read_ram_blocks: u64,
    /// Blocks written to RAM.
    pub write_ram_blocks: u64,
    /// Bytes of all requests.
    pub request_bytes: u64,
    /// Bytes read from the image.
    pub image_read_bytes: u64,
    /// CPU time of the export, in milliseconds.
    pub cpu_ms: f64,
}

/// The result of a run.
#[derive(Debug)]
pub struct Ran {
    /// The phases, in order.
    pub phases: Vec<Phase>,
    /// The samples: one at the end of each interval, and one between two phases.
    pub samples: Vec<CounterSample>,
    /// The recording of the disk's requests, in the format of `headwater export --record`.
    pub recording: Vec<u8>,
    /// KVM, or the reason why KVM is not used.
    pub acceleration: String,
}

/// The path of `headwater`: in the directory of this program, or in PATH.
pub fn find_program() -> Result<PathBuf> {
    let beside = std::env::current_exe().ok().and_then(|own| Some(own.parent()?.join("headwater")));
    if let Some(program) = beside.filter(|program| program.is_file()) {
        return Ok(program);
    }
    if is_installed("headwater") {
        return Ok("headwater".into());
    }
    bail!(
        "the program headwater is neither in the directory of this program nor in PATH: give it with --headwater FILE"
    )
}

/// Checks the preconditions, so that a run does not fail late.
pub fn check(image: &Path, program: &Path) -> Result<()> {
    if !image.is_file() {
        bail!(
            "there is no guest at {}: build it with guest/build of the source tree, or give the image of a Debian with the QEMU guest agent, \
             --guest FILE",
            image.display()
        );
    }
    if !is_installed("qemu-system-x86_64") {
        bail!("qemu-system-x86_64 is not installed: apt-get install qemu-system-x86");
    }
    let mut version = Command::new(program);
    version.arg("--version");
    let printed = Started::start("headwater", &mut version).and_then(|started| started.output(|| false));
    printed.with_context(|| format!("cannot run {}", program.display())).map(drop)
}

/// Runs a guest from its boot to the end of its work. `None`: `stop` ended it.
pub fn run(options: &Options<'_>, stop: &AtomicBool, progress: &mut dyn FnMut(&str)) -> Result<Option<Ran>> {
    let (files, sockets) = (Directory::new_in(options.dir)?, Directory::new()?);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
    let runtime = runtime.context("cannot start the threads that communicate with QEMU")?;
    let acceleration = runtime.block_on(probe_acceleration()).context("cannot use QEMU")?;
    let (began, began_at) = (Instant::now(), SystemTime::now());
    let socket = sockets.path().join("disk");
    let mut export = start_export(options, files.path(), &socket)?;
    let stats = files.path().join("stats.json");
    export.wait_for("socket", EXPORT_TIMEOUT, || Ok(socket.exists().then_some(())))?;
    let has_no_counters = AtomicBool::new(false);
    let sampler = Sampler { pid: export.pid(), stats: &stats, began, has_ended: &has_no_counters };
    let (asks, asked) = channel();
    let (ran, samples) = std::thread::scope(|scope| {
        let samples = scope.spawn(|| sampler.each(options.interval, asked));
        let spec = spec(&socket, sockets.path(), &acceleration);
        let clock = Clock { began, asks, has_no_counters: &has_no_counters };
        let phases = runtime.block_on(phases(&spec, options.work, &clock, stop, progress));
        drop(clock);
        let samples =
            samples.join().unwrap_or_else(|_| Err(anyhow!("the thread that reads the counters panicked")));
        (phases, samples)
    });
    // If the disk is gone, the guest fails too. The disk is the cause, so its error is reported.
    export.check().context("the disk ended before its guest")?;
    // If the counters could not be read, the guest was ended early. The counters' error is the cause.
    let samples = samples?;
    let Some(phases) = ran? else { return Ok(None) };
    export.stop(EXPORT_TIMEOUT);
    let path = files.path().join("requests.rec");
    let recording = std::fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let later_s = began_later_s(&path, began_at)?;
    let acceleration = match acceleration {
        Acceleration::Kvm => "KVM".into(),
        Acceleration::Tcg { reason } => format!("emulation ({reason})"),
    };
    let phase = |phase: Phase| Phase {
        from_s: (phase.from_s - later_s).max(0.0),
        to_s: (phase.to_s - later_s).max(0.0),
        ..phase
    };
    let sample = |sample: CounterSample| CounterSample { at_s: (sample.at_s - later_s).max(0.0), ..sample };
    let (phases, samples) =
        (phases.into_iter().map(phase).collect(), samples.into_iter().map(sample).collect());
    Ok(Some(Ran { phases, samples, recording, acceleration }))
}

/// How many seconds after `began_at` the recording began: the export starts after this program's clock.
fn began_later_s(recording: &Path, began_at: SystemTime) -> Result<f64> {
    let reader = Reader::open(recording).with_context(|| format!("cannot read {}", recording.display()))?;
    let recorded = SystemTime::UNIX_EPOCH + Duration::from_micros(reader.began_unix_us());
    Ok(recorded.duration_since(began_at).unwrap_or_default().as_secs_f64())
}

fn start_export(options: &Options<'_>, dir: &Path, socket: &Path) -> Result<Started> {
    // With setpriv, the kernel ends the export if this program is killed.
    let mut command = if is_installed("setpriv") {
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "TERM"]).arg(options.program);
        command
    } else {
        Command::new(options.program)
    };
    command.arg("export").arg(options.image);
    match options.ram_bytes {
        None => command.args(["--cache", "disk"]),
        Some(ram_bytes) => command.args(["--cache", "ram+disk", "--ram", &ram_bytes.to_string()]),
    };
    command.args(["--disk", &options.disk_bytes.to_string()]).arg("--cache-dir").arg(dir);
    command.arg("--stats").arg(dir.join("stats.json")).arg("--record").arg(dir.join("requests.rec"));
    command.arg("--vhost-user").arg(socket);
    Started::start("headwater export", &mut command)
}

fn spec(socket: &Path, dir: &Path, acceleration: &Acceleration) -> GuestSpec {
    GuestSpec {
        name: "study".into(),
        uuid: Uuid::from_u128(0x5354_5544_5900_4000_8000_0000_0000_0003),
        mac: headwater_qemu::MacAddress([0x52, 0x54, 0, 0, 0, 3]),
        memory_bytes: MEMORY_BYTES,
        host_memory_bytes: installed_memory_bytes(),
        cpus: 1,
        disk: Disk::vhost_user(socket),
        scratch: None,
        seed: None,
        run_dir: dir.join("guest"),
        firmware: Firmware::Bios,
        tpm: None,
        display: Display::None,
        network: Network::None,
        acceleration: acceleration.clone(),
        on_reboot: OnReboot::Exit,
    }
}

/// The clock of a run. It also requests samples between phases.
struct Clock<'a> {
    began: Instant,
    asks: Sender<Sender<()>>,
    has_no_counters: &'a AtomicBool,
}

impl Clock<'_> {
    fn now(&self) -> f64 {
        self.began.elapsed().as_secs_f64()
    }

    /// Requests a sample of the counters before the next phase begins. Returns the time of the phase's beginning.
    fn next_phase(&self) -> f64 {
        let (done, is_done) = channel();
        // If the sampling thread has failed, the run reports that at its end.
        if self.asks.send(done).is_ok() {
            let _ = is_done.recv_timeout(EXPORT_TIMEOUT);
        }
        self.now()
    }
}

/// Runs the guest's phases, and ends the guest. `None`: `stop` ended it.
async fn phases(
    spec: &GuestSpec,
    work: Work,
    clock: &Clock<'_>,
    stop: &AtomicBool,
    progress: &mut dyn FnMut(&str),
) -> Result<Option<Vec<Phase>>> {
    progress("the guest boots");
    let from_s = clock.now();
    let guest = Guest::start(spec).await.context("cannot start the guest")?;
    let done = tokio::select! {
        done = in_guest(&guest, work, clock, from_s, progress) => done.map(Some),
        () = raised(stop) => Ok(None),
        () = raised(clock.has_no_counters) => Err(anyhow!("the counters of the disk can no longer be read")),
    };
    // The guest is not shut down, because its disk is discarded.
    let ended = guest.kill().await.context("cannot end the guest");
    let phases = done?;
    ended?;
    Ok(phases)
}

async fn in_guest(
    guest: &Guest,
    work: Work,
    clock: &Clock<'_>,
    from_s: f64,
    progress: &mut dyn FnMut(&str),
) -> Result<Vec<Phase>> {
    guest.wait_booted(BOOT_TIMEOUT).await.context("the guest does not boot")?;
    guest.agent().ping(BOOT_TIMEOUT).await.context("the guest's agent does not answer")?;
    let mut phases = vec![Phase { name: "boot".into(), from_s, to_s: clock.now() }];
    script(guest, &work.script(PREPARE)).await.context("cannot create the file to copy in the guest")?;
    let segments = (1..=work.segments).map(|number| (format!("segment {number}"), work.script(SEGMENT)));
    for (name, commands) in std::iter::once(("logon".to_owned(), LOGON.to_owned())).chain(segments) {
        progress(&name);
        let from_s = clock.next_phase();
        script(guest, &commands).await.with_context(|| format!("the phase {name} failed"))?;
        phases.push(Phase { name, from_s, to_s: clock.now() });
    }
    clock.next_phase();
    Ok(phases)
}

/// Runs a script in the guest.
async fn script(guest: &Guest, script: &str) -> Result<()> {
    let command = ["sh", "-c", script].map(str::to_owned).to_vec();
    let output = guest.agent().exec(&Exec { command, input: Vec::new(), timeout: PHASE_TIMEOUT }).await?;
    if output.exit_code != 0 {
        let words = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        bail!("a script in the guest ended with {}: {words}", output.exit_code);
    }
    Ok(())
}

/// Returns when the flag is set.
async fn raised(stop: &AtomicBool) {
    while !stop.load(Ordering::Relaxed) {
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// Samples the counters of an export.
struct Sampler<'a> {
    pid: Pid,
    stats: &'a Path,
    began: Instant,
    /// Set when the sampler ends.
    has_ended: &'a AtomicBool,
}

impl Sampler<'_> {
    fn each(&self, interval: Duration, asked: Receiver<Sender<()>>) -> Result<Vec<CounterSample>> {
        let samples = self.sample_until_end(interval, asked);
        self.has_ended.store(true, Ordering::Relaxed);
        samples
    }

    /// Samples after each interval, on request, and at the end.
    fn sample_until_end(
        &self,
        interval: Duration,
        asked: Receiver<Sender<()>>,
    ) -> Result<Vec<CounterSample>> {
        let (mut samples, mut next) = (Vec::new(), Instant::now() + interval);
        loop {
            let waited = asked.recv_timeout(next.saturating_duration_since(Instant::now()));
            samples.push(self.sample()?);
            match waited {
                Ok(done) => {
                    // The requester may have stopped waiting.
                    let _ = done.send(());
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return Ok(samples),
            }
            next = Instant::now() + interval;
        }
    }

    fn sample(&self) -> Result<CounterSample> {
        // The export replaces the file atomically.
        let _ = std::fs::remove_file(self.stats);
        let asked = Instant::now();
        kill_process(self.pid, Signal::USR1).context("the disk of the guest has ended")?;
        while !self.stats.exists() {
            if has_ended(self.pid) {
                bail!("the disk of the guest has ended");
            }
            if asked.elapsed() > EXPORT_TIMEOUT {
                bail!("headwater export did not write its counters within {} s", EXPORT_TIMEOUT.as_secs());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        let text = std::fs::read_to_string(self.stats).context("cannot read the counters")?;
        let stats: Value = serde_json::from_str(&text).context("the counters are not JSON")?;
        let sample = sample_of(&stats)?;
        Ok(CounterSample { at_s: self.began.elapsed().as_secs_f64(), cpu_ms: cpu_ms(self.pid)?, ..sample })
    }
}

/// Parses the counters that `--stats` writes.
fn sample_of(stats: &Value) -> Result<CounterSample> {
    let number = |pointer: &str| {
        let found = stats.pointer(pointer).and_then(Value::as_u64);
        found.with_context(|| {
            format!("headwater export has no counter {pointer}; it may be of another version")
        })
    };
    let served = |name: &str| number(&format!("/reads/{name}"));
    let cache = |name: &str| number(&format!("/cache/{name}"));
    Ok(CounterSample {
        at_s: 0.0,
        counts: Counts {
            reads: number("/read_ops")?,
            writes: number("/write_ops")?,
            served: [served("ram")?, served("packed")?, served("zero")?, served("disk")?, served("image")?],
            disk_reads: cache("disk_read_ops")?,
            disk_read_bytes: cache("disk_read_bytes")?,
            disk_writes: cache("disk_write_ops")?,
            disk_write_bytes: cache("disk_write_bytes")?,
            ram_bytes: cache("ram_used_bytes")?,
            overflow_bytes: cache("disk_used_bytes")?,
        },
        read_ram_blocks: cache("read_ram_blocks")? + cache("read_packed_blocks")?,
        write_ram_blocks: cache("write_in_place_blocks")? + cache("write_new_blocks")?,
        request_bytes: number("/read_bytes")? + number("/write_bytes")?,
        image_read_bytes: number("/image_read_bytes")?,
        cpu_ms: 0.0,
    })
}

/// The fields of a process's status, beginning with its state.
fn status_of(pid: Pid) -> Result<Vec<String>> {
    let path = format!("/proc/{}/stat", pid.as_raw_nonzero());
    let stat = std::fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
    // The fields after the name, which may contain blanks and parentheses.
    let fields = stat.rsplit_once(')').map_or("", |(_, fields)| fields).split_whitespace();
    Ok(fields.map(str::to_owned).collect())
}

/// Whether a child of this program has ended. It is a zombie until it is waited for.
fn has_ended(pid: Pid) -> bool {
    status_of(pid).map_or(true, |fields| fields.first().is_none_or(|state| state == "Z" || state == "X"))
}

/// CPU time of a process with all its threads, in milliseconds.
fn cpu_ms(pid: Pid) -> Result<f64> {
    let fields = status_of(pid)?;
    let ticks: Vec<u64> = fields.iter().skip(11).take(2).filter_map(|field| field.parse().ok()).collect();
    let [user, system] = ticks[..] else {
        bail!("the status of process {} has an unexpected form", pid.as_raw_nonzero())
    };
    Ok((user + system) as f64 * 1000.0 / rustix::param::clock_ticks_per_second() as f64)
}

/// The phases in the text format of `.phases` files: for each phase a line with name, beginning and end in seconds,
/// separated by tabs.
pub fn phases_text(phases: &[Phase]) -> String {
    let line = |phase: &Phase| format!("{}\t{:.3}\t{:.3}\n", phase.name, phase.from_s, phase.to_s);
    phases.iter().map(line).collect()
}

/// Parses that text format.
pub fn parse_phases(text: &str) -> Result<Vec<Phase>> {
    let mut phases: Vec<Phase> = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let line_number = number + 1;
        let fields: Vec<&str> = line.split('\t').collect();
        let [name, from, to] = fields[..] else {
            bail!(
                "line {line_number} has {} fields; the format is NAME, tab, beginning, tab, end",
                fields.len()
            );
        };
        let seconds = |text: &str| {
            let parsed = text.parse::<f64>().ok().filter(|seconds| (0.0..1e9).contains(seconds));
            parsed.with_context(|| format!("line {line_number}: {text:?} is not a time in seconds"))
        };
        let (from_s, to_s) = (seconds(from)?, seconds(to)?);
        if name.is_empty() || to_s <= from_s || phases.last().is_some_and(|last| from_s < last.to_s) {
            bail!(
                "line {line_number}: a phase needs a name, an end after its beginning, and a beginning after the end of the previous phase"
            );
        }
        phases.push(Phase { name: name.to_owned(), from_s, to_s });
    }
    if phases.is_empty() {
        bail!("it contains no phase");
    }
    Ok(phases)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn phases_are_read_as_they_are_written() {
        let phase = |name: &str, from_s, to_s| Phase { name: name.into(), from_s, to_s };
        let phases = [phase("boot", 0.25, 21.5), phase("segment 1", 30.0, 90.125)];
        assert_eq!(parse_phases(&phases_text(&phases)).unwrap(), phases);
        for (broken, why) in [
            ("", "no phase"),
            ("boot\t1", "line 1 has 2 fields"),
            ("boot\t0\t5\nlogon\tx\t6", "line 2: \"x\" is not a time"),
            ("boot\t5\t5", "an end after its beginning"),
            ("boot\t0\t5\nlogon\t4\t6", "line 2: a phase"),
        ] {
            let error = parse_phases(broken).unwrap_err().to_string();
            assert!(error.contains(why), "{broken:?}: {error}");
        }
    }

    #[test]
    fn counters_of_another_version_are_refused() {
        let error = sample_of(&serde_json::json!({"read_ops": 1})).unwrap_err().to_string();
        assert!(error.contains("no counter /write_ops") && error.contains("another version"), "{error}");
    }

    #[test]
    fn counters_of_a_disk_that_has_ended_are_not_waited_for() {
        let mut ended = Command::new("true").spawn().unwrap();
        let dir = tempfile::tempdir().unwrap();
        let (has_ended, stats) = (AtomicBool::new(false), dir.path().join("stats.json"));
        let sampler = Sampler {
            pid: Pid::from_child(&ended),
            stats: &stats,
            began: Instant::now(),
            has_ended: &has_ended,
        };
        // There is no requester, and the channel stays open: only the end of the disk ends the thread.
        let (_asks, asked) = channel();
        let error = sampler.each(Duration::from_millis(1), asked).unwrap_err();
        assert_eq!(error.to_string(), "the disk of the guest has ended");
        assert!(sampler.has_ended.load(Ordering::Relaxed));
        ended.wait().unwrap();
    }

    #[test]
    fn a_recording_begins_later_than_the_clock() {
        let began_at = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000);
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("requests.rec");
        let later_s = |began_us| {
            let file = std::fs::File::create(&path).unwrap();
            headwater_recorder::format::Writer::new(file, began_us, &[1 << 20]).unwrap().finish().unwrap();
            began_later_s(&path, began_at).unwrap()
        };
        assert_eq!(later_s(1_002_500_000), 2.5);
        // The host's clock was set back in the meantime.
        assert_eq!(later_s(1), 0.0);
        std::fs::write(&path, "no recording").unwrap();
        assert!(began_later_s(&path, began_at).unwrap_err().to_string().contains("cannot read"));
    }

    #[test]
    fn a_process_has_used_its_processor_time() {
        let own = rustix::process::getpid();
        let before = cpu_ms(own).unwrap();
        let mut sum = 0_u64;
        while cpu_ms(own).unwrap() - before < 20.0 {
            sum = sum.wrapping_mul(31).wrapping_add(7);
        }
        assert!(cpu_ms(own).unwrap() > before, "{sum}");
    }
}

//! Records requests: a queue that never blocks a request, and a thread that writes the file.

use std::fs::{File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use headwater_block::Device;
use parking_lot::Mutex;

use crate::device::RecordedDevice;
use crate::format::{Entry, Record, Writer};

/// The most requests in the queue, about 2 MiB. Further ones are dropped.
pub const QUEUED_REQUESTS: usize = 65_536;

/// The most requests in a file, about 1.2 GiB.
pub const MOST_REQUESTS: u64 = 250_000_000;

/// A recorded request is in the file after this time at the latest.
pub const FLUSH_INTERVAL: Duration = Duration::from_secs(1);

enum Message {
    Request(Entry),
    End,
}

/// The result of a recording.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Summary {
    /// Requests in the file.
    pub requests: u64,
    /// Requests that were left out, because the queue was full.
    pub dropped: u64,
    /// Why the recording ended early.
    pub failure: Option<String>,
}

/// A recording in progress. All recorded devices share it.
pub struct Recorder {
    path: PathBuf,
    began: Instant,
    queue: SyncSender<Message>,
    is_over: AtomicBool,
    dropped: Arc<AtomicU64>,
    thread: Mutex<Option<JoinHandle<Summary>>>,
}

impl Recorder {
    /// Creates the file and starts recording. Fails if the file exists, because it may be another recording.
    /// `now` is stored in the file as the start time.
    pub fn create(path: &Path, volumes_bytes: &[u64], now: SystemTime) -> io::Result<Arc<Self>> {
        Self::with_limits(path, volumes_bytes, now, (QUEUED_REQUESTS, MOST_REQUESTS))
    }

    fn with_limits(
        path: &Path,
        volumes_bytes: &[u64],
        now: SystemTime,
        (queued, most_requests): (usize, u64),
    ) -> io::Result<Arc<Self>> {
        let file = OpenOptions::new().write(true).create_new(true).open(path)?;
        let since_1970 = now.duration_since(UNIX_EPOCH).unwrap_or_default();
        let since_1970_us = u64::try_from(since_1970.as_micros()).unwrap_or(u64::MAX);
        let mut writer = Writer::new(file, since_1970_us, volumes_bytes)?;
        // If the disk is full, this fails.
        writer.flush()?;
        let (queue, requests) = sync_channel(queued);
        let (began, dropped) = (Instant::now(), Arc::new(AtomicU64::new(0)));
        let (path_of_thread, left_out) = (path.to_owned(), Arc::clone(&dropped));
        let thread = Thread {
            writer,
            began,
            dropped: left_out,
            path: path_of_thread,
            reported_dropped: 0,
            most_requests,
        };
        let thread =
            std::thread::Builder::new().name("recorder".into()).spawn(move || thread.run(&requests))?;
        let (path, is_over) = (path.to_owned(), AtomicBool::new(false));
        Ok(Arc::new(Self { path, began, queue, is_over, dropped, thread: Mutex::new(Some(thread)) }))
    }

    /// Returns a device that records its requests as those of volume number `volume`. Writes are compared
    /// with `base`, the image.
    pub fn device(
        self: &Arc<Self>,
        volume: u16,
        device: Arc<dyn Device>,
        base: Option<Arc<dyn Device>>,
    ) -> Arc<dyn Device> {
        Arc::new(RecordedDevice::new(Arc::clone(self), volume, device, base))
    }

    /// The path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether the recording has ended.
    pub(crate) fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Relaxed)
    }

    /// Microseconds since the recording began.
    pub(crate) fn time_us(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_micros()).unwrap_or(u64::MAX)
    }

    /// Adds a request, or drops it if the queue is full. Never waits.
    pub(crate) fn add(&self, entry: Entry) {
        use std::sync::mpsc::TrySendError;
        match self.queue.try_send(Message::Request(entry)) {
            Ok(()) => {}
            Err(TrySendError::Full(_)) => {
                self.dropped.fetch_add(1, Ordering::Relaxed);
            }
            // The thread has ended: the file could not be written, or it is full.
            Err(TrySendError::Disconnected(_)) => self.is_over.store(true, Ordering::Relaxed),
        }
    }

    /// Ends the recording and closes the file. Returns `None` if it has already ended.
    pub fn finish(&self) -> Option<Summary> {
        self.is_over.store(true, Ordering::Relaxed);
        let thread = self.thread.lock().take()?;
        // Fails only if the thread has ended by itself.
        let _ = self.queue.send(Message::End);
        let failed = || Summary { requests: 0, dropped: 0, failure: Some("its thread panicked".into()) };
        Some(thread.join().unwrap_or_else(|_| failed()))
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        self.finish();
    }
}

struct Thread {
    writer: Writer<File>,
    began: Instant,
    dropped: Arc<AtomicU64>,
    path: PathBuf,
    /// Dropped requests that the file mentions so far.
    reported_dropped: u64,
    most_requests: u64,
}

impl Thread {
    fn run(mut self, requests: &Receiver<Message>) -> Summary {
        let (mut count, all_dropped, path) = (0, Arc::clone(&self.dropped), self.path.clone());
        let is_full = |count| {
            let message = format!("it has {count} requests, the most that one recording can have");
            io::Error::other(message)
        };
        let recorded = self.record(requests, &mut count);
        let was_full = count >= self.most_requests;
        let result = recorded.and_then(|()| self.end());
        let result = if was_full { result.and_then(|()| Err(is_full(count))) } else { result };
        let dropped = all_dropped.load(Ordering::Relaxed);
        let failure = result.err().map(|error| error.to_string());
        if let Some(failure) = &failure {
            let path = path.display();
            tracing::error!("the recording {path} ended early: {failure}; the disk works on without it");
        }
        Summary { requests: count, dropped, failure }
    }

    fn record(&mut self, requests: &Receiver<Message>, count: &mut u64) -> io::Result<()> {
        let mut flush_at = Instant::now() + FLUSH_INTERVAL;
        let mut has_unflushed = false;
        loop {
            let message = requests.recv_timeout(flush_at.saturating_duration_since(Instant::now()));
            self.record_dropped()?;
            match message {
                Ok(Message::Request(entry)) => {
                    self.writer.add(Record::Request(entry))?;
                    (*count, has_unflushed) = (*count + 1, true);
                    if *count >= self.most_requests {
                        return Ok(());
                    }
                }
                Ok(Message::End) | Err(RecvTimeoutError::Disconnected) => return Ok(()),
                Err(RecvTimeoutError::Timeout) => {}
            }
            if Instant::now() >= flush_at {
                if std::mem::take(&mut has_unflushed) {
                    self.writer.flush()?;
                }
                flush_at = Instant::now() + FLUSH_INTERVAL;
            }
        }
    }

    fn time_us(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_micros()).unwrap_or(u64::MAX)
    }

    /// Records how many requests were dropped since the last such record.
    fn record_dropped(&mut self) -> io::Result<()> {
        let dropped = self.dropped.load(Ordering::Relaxed);
        if dropped == self.reported_dropped {
            return Ok(());
        }
        if self.reported_dropped == 0 {
            let path = self.path.display();
            tracing::warn!(
                "requests are missing in the recording {path}, because they came faster than they could be written"
            );
        }
        let count = dropped - std::mem::replace(&mut self.reported_dropped, dropped);
        self.writer.add(Record::Dropped { time_us: self.time_us(), count })
    }

    fn end(mut self) -> io::Result<()> {
        self.record_dropped()?;
        let time_us = self.time_us();
        self.writer.add(Record::End { time_us })?;
        self.writer.finish()?.sync_all()
    }
}

#[cfg(test)]
mod tests {
    use headwater_block::blocking;
    use headwater_testkit::conformance::{self, Options};
    use headwater_testkit::{ReferenceDisk, ReferenceOptions, Rng, Waits};

    use super::*;
    use crate::content::Content;
    use crate::format::{Kind, Reader};

    const SIZE: u64 = 8 << 20;

    fn records(path: &Path) -> Vec<Record> {
        let mut reader = Reader::open(path).unwrap();
        std::iter::from_fn(|| reader.next_record().unwrap()).collect()
    }

    #[test]
    fn requests_that_wait_and_those_that_do_not_are_recorded_once() {
        let dir = tempfile::tempdir().unwrap();
        for (number, waits) in [Waits::Never, Waits::Always].into_iter().enumerate() {
            let path = dir.path().join(format!("record-{number}"));
            let recorder = Recorder::create(&path, &[SIZE, SIZE], UNIX_EPOCH).unwrap();
            let disk = |options| Arc::new(ReferenceDisk::with_options(SIZE, options)) as Arc<dyn Device>;
            let base = disk(ReferenceOptions::default());
            let options = ReferenceOptions { waits, ..ReferenceOptions::default() };
            let device = recorder.device(1, disk(options), Some(Arc::clone(&base)));
            let data = Rng::new(3).bytes(12_288);
            blocking::write(&*base, 65_536, &data).unwrap();
            blocking::write(&*device, 512, &data[..4096]).unwrap();
            blocking::write(&*device, 65_536, &data).unwrap();
            blocking::write(&*device, 4096, &[0; 4096]).unwrap();
            blocking::read(&*device, 0, &mut [0; 1024]).unwrap();
            blocking::write_zeroes(&*device, 8192, 4096).unwrap();
            blocking::discard(&*device, 0, 1 << 20).unwrap();
            blocking::flush(&*device).unwrap();
            let summary = recorder.finish().unwrap();
            assert_eq!(summary, Summary { requests: 7, dropped: 0, failure: None });
            // Later requests are not recorded; that is no error.
            blocking::write(&*device, 512, &data[..4096]).unwrap();
            let mut last_us = 0;
            let found = records(&path).into_iter().map(|record| match record {
                Record::Request(entry) => {
                    assert!(entry.time_us >= last_us && entry.volume == 1);
                    last_us = entry.time_us;
                    (entry.kind, entry.offset, entry.bytes, entry.content)
                }
                Record::End { .. } => (Kind::Flush, 1, 1, Content::Unknown),
                Record::Dropped { .. } => panic!("nothing was dropped"),
            });
            let expected = [
                (Kind::Write, 512, 4096, Content::Packs(16)),
                (Kind::Write, 65_536, 12_288, Content::Equal),
                (Kind::Write, 4096, 4096, Content::Zero),
                (Kind::Read, 0, 1024, Content::Unknown),
                (Kind::WriteZeroes, 8192, 4096, Content::Unknown),
                (Kind::Discard, 0, 1 << 20, Content::Unknown),
                (Kind::Flush, 0, 0, Content::Unknown),
                (Kind::Flush, 1, 1, Content::Unknown),
            ];
            assert_eq!(found.collect::<Vec<_>>(), expected);
        }
    }

    #[test]
    fn a_recorded_device_passes_the_suite_of_all_devices() {
        let dir = tempfile::tempdir().unwrap();
        let recorder = Recorder::create(&dir.path().join("record"), &[SIZE], UNIX_EPOCH).unwrap();
        let options = ReferenceOptions { waits: Waits::PerMille(300), ..ReferenceOptions::default() };
        let disk = Arc::new(ReferenceDisk::with_options(SIZE, options));
        let device = recorder.device(0, Arc::clone(&disk) as Arc<dyn Device>, None);
        conformance::check(&device, &Options::default());
        let counts = disk.counts();
        let summary = recorder.finish().unwrap();
        let carried_out = counts.reads + counts.writes + counts.zeroes + counts.discards + counts.flushes;
        assert_eq!(summary.requests + summary.dropped, carried_out);
    }

    #[test]
    fn a_full_queue_drops_requests_and_says_how_many() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("record");
        let recorder = Recorder::with_limits(&path, &[SIZE], UNIX_EPOCH, (1, 1 << 20)).unwrap();
        let device = recorder.device(0, Arc::new(ReferenceDisk::new(SIZE)), None);
        let mut sent = 0;
        while recorder.dropped.load(Ordering::Relaxed) < 10 {
            blocking::flush(&*device).unwrap();
            sent += 1;
        }
        let summary = recorder.finish().unwrap();
        let told: u64 = records(&path)
            .iter()
            .map(|record| if let Record::Dropped { count, .. } = record { *count } else { 0 })
            .sum();
        assert!(summary.dropped >= 10, "{summary:?}");
        assert_eq!((summary.requests + summary.dropped, told), (sent, summary.dropped));
    }

    #[test]
    fn a_full_recording_ends_in_order_and_says_so() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("record");
        let recorder = Recorder::with_limits(&path, &[SIZE], UNIX_EPOCH, (64, 5)).unwrap();
        let device = recorder.device(0, Arc::new(ReferenceDisk::new(SIZE)), None);
        for _ in 0..9 {
            blocking::flush(&*device).unwrap();
        }
        let summary = recorder.finish().unwrap();
        assert_eq!(summary.requests, 5);
        let failure = summary.failure.unwrap();
        assert!(failure.contains("5 requests, the most"), "{failure}");
        let records = records(&path);
        assert_eq!(records.len(), 6);
        assert!(matches!(records.last(), Some(Record::End { .. })), "{records:?}");
    }

    #[test]
    fn a_recording_that_cannot_be_written_ends_and_the_disk_goes_on() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("record");
        std::fs::write(&path, "precious").unwrap();
        assert!(Recorder::create(&path, &[SIZE], UNIX_EPOCH).is_err());
        assert_eq!(std::fs::read(&path).unwrap(), b"precious");
        let mount = dir.path().join("small");
        std::fs::create_dir(&mount).unwrap();
        let test = headwater_testkit::test_name(a_recording_that_cannot_be_written_ends_and_the_disk_goes_on);
        headwater_testkit::on_small_file_system(test, &mount, 1, |small| {
            let path = small.join("record");
            let recorder = Recorder::create(&path, &[SIZE], UNIX_EPOCH).unwrap();
            let device = recorder.device(0, Arc::new(ReferenceDisk::new(SIZE)), None);
            let mut rng = Rng::new(4);
            while !recorder.is_over() {
                let offset = rng.below(SIZE / 512) * 512;
                blocking::read(&*device, offset, &mut [0; 512]).unwrap();
            }
            assert!(recorder.finish().unwrap().failure.is_some());
            blocking::read(&*device, 0, &mut [0; 512]).unwrap();
        });
    }
}

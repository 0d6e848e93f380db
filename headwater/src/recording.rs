//! Records the chunks that boots of a version read, for its boot trace.
//!
//! | the recording ends | its chunks |
//! |---|---|
//! | after [`BOOT_LASTS`], or with its machine after the guest was up | are merged into the trace as a boot |
//! | with its machine before the guest was up | are added to the trace without counting as a boot, so that some aborted starts do not fill the trace |

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use headwater_image::{ImageError, VersionReader};
use tokio::sync::watch;

use crate::traces::Traces;

/// How long a boot is recorded after the machine's disk was opened.
const BOOT_LASTS: Duration = Duration::from_secs(120);
/// How long the end of a recording waits until the trace is stored. A store that does not answer delays nobody
/// longer.
/// Tests read the trace then, so they wait longer.
const STORE_TIMEOUT: Duration = Duration::from_secs(if cfg!(test) { 120 } else { 5 });
/// How often that is checked.
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// The recording of a boot. It is stored when its time is over, or when this is dropped.
pub struct Recording {
    end: watch::Sender<()>,
    thread: JoinHandle<()>,
    has_booted: Arc<AtomicBool>,
}

impl Recording {
    /// Starts to record reads.
    pub fn start(traces: &Arc<Traces>, reader: &Arc<VersionReader>) -> Result<Self, ImageError> {
        reader.record(BOOT_LASTS);
        let (end, mut ended) = watch::channel(());
        let has_booted = Arc::new(AtomicBool::new(false));
        let (traces, reader, is_up) = (Arc::clone(traces), Arc::clone(reader), Arc::clone(&has_booted));
        let run = move || {
            while !reader.is_recording_over() && !matches!(ended.has_changed(), Err(_) | Ok(true)) {
                std::thread::sleep(Duration::from_millis(50));
            }
            ended.mark_unchanged();
            let is_boot = reader.is_recording_over() || is_up.load(Ordering::Acquire);
            keep(&traces, &reader, is_boot);
        };
        let thread = std::thread::Builder::new().name("boot-trace".into()).spawn(run);
        let thread =
            thread.map_err(|e| ImageError::from_os("cannot start a thread that records a boot", &e))?;
        Ok(Self { end, thread, has_booted })
    }

    /// The guest is up, so the recording counts as a boot.
    pub fn has_booted(&self) {
        self.has_booted.store(true, Ordering::Release);
    }
}

fn keep(traces: &Traces, reader: &VersionReader, is_boot: bool) {
    let Some(recorded) = reader.recorded() else { return };
    let version = recorded.manifest.short();
    let kept = if is_boot { traces.merge(recorded).map(Some) } else { traces.merge_part(recorded) };
    match kept {
        Ok(Some((trace, _))) if is_boot => {
            tracing::info!(%version, boots = trace.boots, chunks = trace.chunks.len(), "a boot was recorded");
        }
        Ok(Some((trace, _))) => {
            tracing::info!(%version, boots = trace.boots, chunks = trace.chunks.len(),
                "a machine ended before its guest was up: its reads were added to the boot trace");
        }
        Ok(None) => {
            tracing::debug!(%version, "a machine ended before its guest was up: nothing new was recorded")
        }
        Err(e) => tracing::info!(%version, error = %e, "cannot store the recording of a boot"),
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        let _ = self.end.send(());
        let until = Instant::now() + STORE_TIMEOUT;
        // Not joined: after the timeout the thread continues as long as the store lets it wait.
        while !self.thread.is_finished() && Instant::now() < until {
            std::thread::sleep(POLL_INTERVAL);
        }
    }
}

#[cfg(test)]
mod tests {
    use headwater_block::blocking;
    use headwater_image::{ChunkCache, ImportOptions, import, open_source};
    use headwater_store::{Access, Hash, LocalDir, Store};

    use super::*;

    const CHUNK: u64 = 65_536;

    struct Fixture {
        _dir: tempfile::TempDir,
        store: Arc<dyn Store>,
        chunks: Arc<ChunkCache>,
        traces: Arc<Traces>,
        manifest: Hash,
    }

    impl Fixture {
        fn new() -> Self {
            let dir = tempfile::tempdir().unwrap();
            let (raw, at) = (dir.path().join("disk.raw"), dir.path().join("store"));
            let mut rng = headwater_testkit::Rng::new(5);
            let disk: Vec<u8> = (0..CHUNK * 4).flat_map(|_| rng.next_u64().to_le_bytes()).collect();
            std::fs::write(&raw, &disk).unwrap();
            let store = LocalDir::open(&at, Access::WRITE).unwrap();
            let options = ImportOptions::new("disk".parse().unwrap(), 0);
            let imported = import(open_source(&raw, None).unwrap(), &store, &options, &mut |_| {}).unwrap();
            let (store, chunks) = (Arc::new(store) as Arc<dyn Store>, ChunkCache::new(16 << 20));
            let traces = Arc::new(Traces::new(Arc::clone(&store), Arc::clone(&chunks)));
            Self { _dir: dir, store, chunks, traces, manifest: imported.version.manifest }
        }

        /// A recording of a machine that reads these chunks.
        fn machine(&self, chunks: &[u64]) -> Recording {
            let reader = VersionReader::open(&*self.store, self.manifest, Arc::clone(&self.chunks)).unwrap();
            reader.stop_readahead();
            let recording = Recording::start(&self.traces, &reader).unwrap();
            for chunk in chunks {
                blocking::read(reader.as_ref(), chunk * CHUNK, &mut [0; 512]).unwrap();
            }
            recording
        }

        /// The number of boots in the trace, and its chunks.
        fn trace(&self) -> (u32, Vec<u64>) {
            let (trace, _) = self.traces.find(self.manifest).unwrap();
            let mut chunks: Vec<u64> = trace.chunks.iter().map(|touched| touched.chunk).collect();
            chunks.sort_unstable();
            (trace.boots, chunks)
        }
    }

    #[test]
    fn starts_that_end_at_once_are_not_all_that_is_recorded() {
        let fixture = Fixture::new();
        for _ in 0..6 {
            drop(fixture.machine(&[0]));
        }
        assert_eq!(fixture.trace(), (1, vec![0]));
        let whole = fixture.machine(&[0, 5, 6]);
        whole.has_booted();
        drop(whole);
        assert_eq!(fixture.trace(), (2, vec![0, 5, 6]));
    }

    #[test]
    fn machines_that_all_end_soon_have_a_trace_that_does_not_grow_for_ever() {
        let fixture = Fixture::new();
        for chunk in 0..12 {
            drop(fixture.machine(&[0, chunk]));
        }
        assert_eq!(fixture.trace(), (1, vec![0, 1, 2, 3]));
        // Chunks that only these boots read are dropped from the trace in the end.
        for _ in 0..3 {
            let whole = fixture.machine(&[0, 5]);
            whole.has_booted();
        }
        assert_eq!(fixture.trace(), (4, vec![0, 5]));
    }
}

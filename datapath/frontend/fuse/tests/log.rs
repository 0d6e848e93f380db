//! The log says which file had what error and why, and a disk that fails all the time does not fill it.

mod fixture;

use std::io::Write;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use fixture::Mounted;
use headwater_block::{ByteRange, IoErrorKind};
use headwater_testkit::{ReferenceDisk, ReferenceOptions, Waits};
use rustix::io::Errno;

#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl Log {
    /// What was logged since it was last asked.
    fn take(&self) -> Vec<String> {
        let text = String::from_utf8(std::mem::take(&mut *self.0.lock().unwrap())).unwrap();
        text.lines().map(str::to_owned).collect()
    }
}

#[test]
fn errors_are_told_with_file_and_reason_and_only_so_often() {
    let log = Log::default();
    let writer = log.clone();
    tracing_subscriber::fmt()
        .with_writer(move || writer.clone())
        .with_max_level(tracing::Level::WARN)
        .with_ansi(false)
        .init();
    // Errors come back at once, and later from another thread.
    for waits in [Waits::Never, Waits::Always] {
        let options = ReferenceOptions { waits, ..Default::default() };
        let disk = ReferenceDisk::with_options(1 << 20, options);
        disk.fail(ByteRange::new(8192, 4096).unwrap(), IoErrorKind::Device);
        let mounted = Mounted::with(disk, headwater_fuse::Options::default());
        let file = mounted.open();
        let started = Instant::now();
        for _ in 0..500 {
            let failed = file.read_at(&mut [0; 4096], 8192).unwrap_err();
            assert_eq!(Errno::from_io_error(&failed), Some(Errno::IO));
        }
        let lines = log.take();
        let path = mounted.file();
        let who = format!("fuse: {}: a read of 8192+4096 failed: injected failure", path.display());
        assert!(lines[0].contains(" WARN ") && lines[0].contains(&who), "{}", lines[0]);
        // Twenty and, after the first ten seconds, how many were kept back; a busy host may take longer than those.
        let windows = 1 + started.elapsed().as_secs() as usize / 10;
        assert!(lines.len() <= 21 * windows, "{} lines", lines.len());
        // What does not fail is no matter for the log.
        file.read_at(&mut [0; 4096], 0).unwrap();
        assert_eq!(log.take(), Vec::<String>::new());
    }
}

//! The log says which file had which error and why, and a disk that always fails writes a limited number of
//! lines.

#[path = "it/fixture/mod.rs"]
#[expect(dead_code, reason = "it is for others, too")]
mod fixture;

use std::os::unix::fs::FileExt;
use std::time::Instant;

use fixture::Mounted;
use headwater_block::{ByteRange, IoErrorKind};
use headwater_testkit::{Log, ReferenceDisk, ReferenceOptions, Waits};
use rustix::io::Errno;

#[test]
fn errors_are_told_with_file_and_reason_and_only_so_often() {
    let log = Log::of_warnings();
    // Errors are returned at once, and later from another thread.
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
        let said = log.take();
        let lines: Vec<&str> = said.lines().collect();
        let path = mounted.file();
        let who = format!("fuse: {}: a read of 8192+4096 failed: injected failure", path.display());
        assert!(lines[0].contains(" WARN ") && lines[0].contains(&who), "{}", lines[0]);
        // Twenty lines for each ten seconds, and after the first ten a line with the number of omitted ones.
        // A busy host may need more than ten seconds.
        let windows = 1 + started.elapsed().as_secs() as usize / 10;
        assert!(lines.len() <= 21 * windows, "{} lines", lines.len());
        // Requests that succeed are not logged.
        file.read_at(&mut [0; 4096], 0).unwrap();
        assert_eq!(log.take(), "");
    }
}

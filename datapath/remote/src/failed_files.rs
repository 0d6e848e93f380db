//! Remembers files whose transfer from a server kept failing until the read gave up. Later reads of them give
//! up sooner.

use std::time::Instant;

use crate::servers::Servers;

/// The most such files that are remembered.
const BROKEN_MAX: usize = 256;

/// A file whose transfer from a server kept failing.
#[derive(Debug)]
pub(crate) struct FailedFile {
    server: usize,
    path: String,
    until: Instant,
}

impl Servers {
    /// Records that transfers of `path` from this server kept failing until the read gave up.
    pub(crate) fn note_failed_file(&self, server: usize, path: &str) {
        let until = Instant::now() + self.limits.distrust;
        let failed_files = &mut self.state.lock().failed_files;
        failed_files.retain(|known| known.server != server || known.path != path);
        failed_files.push_back(FailedFile { server, path: path.to_owned(), until });
        if failed_files.len() > BROKEN_MAX {
            failed_files.pop_front();
        }
    }

    /// Whether this was recorded recently for the server and `path`.
    pub(crate) fn has_failed_file(&self, server: usize, path: &str) -> bool {
        let now = Instant::now();
        let failed_files = &mut self.state.lock().failed_files;
        while failed_files.front().is_some_and(|oldest| oldest.until <= now) {
            failed_files.pop_front();
        }
        failed_files.iter().any(|known| known.server == server && known.path == path)
    }
}

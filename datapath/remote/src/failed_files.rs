//! Files that servers broke off until they were given up: the next reads of them are not to take as long to find that out.

use std::time::Instant;

use crate::servers::Servers;

/// Files that servers broke off, of which is known that they did.
const BROKEN_MAX: usize = 256;

/// A file that a server broke off until it was given up.
#[derive(Debug)]
pub(crate) struct FailedFile {
    server: usize,
    path: String,
    until: Instant,
}

impl Servers {
    /// It broke `path` off until it was given up: the next reads of it shall not take as long to find that out.
    pub(crate) fn note_failed_file(&self, server: usize, path: &str) {
        let until = Instant::now() + self.limits.distrust;
        let failed_files = &mut self.state.lock().failed_files;
        failed_files.retain(|known| known.server != server || known.path != path);
        failed_files.push_back(FailedFile { server, path: path.to_owned(), until });
        if failed_files.len() > BROKEN_MAX {
            failed_files.pop_front();
        }
    }

    /// Whether it broke `path` off until it was given up, not long ago.
    pub(crate) fn has_failed_file(&self, server: usize, path: &str) -> bool {
        let now = Instant::now();
        let failed_files = &mut self.state.lock().failed_files;
        while failed_files.front().is_some_and(|oldest| oldest.until <= now) {
            failed_files.pop_front();
        }
        failed_files.iter().any(|known| known.server == server && known.path == path)
    }
}

//! Files that servers broke off until they were given up: the next reads of them are not to take as long to find that out.

use std::time::Instant;

use crate::servers::Servers;

/// Files that servers broke off, of which is known that they did.
const BROKEN_MAX: usize = 256;

/// A file that a server broke off until it was given up.
#[derive(Debug)]
pub(crate) struct Broken {
    server: usize,
    path: String,
    until: Instant,
}

impl Servers {
    /// It broke `path` off until it was given up: the next reads of it shall not take as long to find that out.
    pub(crate) fn is_broken(&self, server: usize, path: &str) {
        let until = Instant::now() + self.limits.distrust;
        let broken = &mut self.state.lock().broken;
        broken.retain(|known| known.server != server || known.path != path);
        broken.push_back(Broken { server, path: path.to_owned(), until });
        if broken.len() > BROKEN_MAX {
            broken.pop_front();
        }
    }

    /// Whether it broke `path` off until it was given up, not long ago.
    pub(crate) fn was_broken(&self, server: usize, path: &str) -> bool {
        let now = Instant::now();
        let broken = &mut self.state.lock().broken;
        while broken.front().is_some_and(|oldest| oldest.until <= now) {
            broken.pop_front();
        }
        broken.iter().any(|known| known.server == server && known.path == path)
    }
}

//! Images that are read: by many at a time, across a network, over a slow line, by guests that boot.
//!
//! | case | of the promise |
//! |---|---|
//! | [`storm`] | many readers cost the store one reading, and the server no more than a plain file does |
//! | [`remote`] | a server across TLS is as fast as a disk |
//! | [`versions`] | 200 versions are read as fast as one |
//! | [`replay`] | a boot trace makes the best of a slow line |
//! | [`guests`] | a guest boots over it, and when a server dies; and it hardly notices that a version is made of it |

mod boot_log;
mod guests;
mod line;
mod over_nbd;
mod remote;
mod replay;
mod server;
mod stores;
mod storm;
mod versions;

use anyhow::Result;
use serde::Serialize;

use crate::Plan;
use crate::targets::{Goal, Unavailable};

pub use line::relay;
pub use over_nbd::read_over;

/// Figures of ours beside those of somebody else, or beside what is to be reached.
#[derive(Clone, Debug, Serialize)]
pub struct Comparison {
    /// The case.
    pub case: &'static str,
    /// What is compared, with its unit.
    pub figure: &'static str,
    /// Ours; one for each round.
    pub ours: Vec<f64>,
    /// With what.
    pub peer: String,
    /// Theirs; one for each round, or the limit.
    pub theirs: Vec<f64>,
    /// What the ratio of the medians has to be.
    pub goal: Goal,
}

/// A case of this family.
pub struct StreamCase {
    /// Name for `--only`.
    pub name: &'static str,
    /// What it shows.
    pub title: &'static str,
    /// Measures it. [`Unavailable`] where what it needs is not there.
    pub run: fn(&Plan) -> Result<Vec<Comparison>>,
}

/// All of them.
pub const CASES: [StreamCase; 8] = [
    StreamCase {
        name: "storm-cold",
        title: "32 readers of the same 300 MB of an image, nothing in the chunk cache, from a store on this host",
        run: storm::cold,
    },
    StreamCase {
        name: "storm-warm",
        title: "16 readers of a 2 GiB image over NBD on TCP, in the chunk cache, beside nbdkit and qemu-nbd with a file in the page cache",
        run: storm::warm,
    },
    StreamCase {
        name: "remote-tls",
        title: "one reader in order of an image on a server across TLS, nothing cached",
        run: remote::run,
    },
    StreamCase {
        name: "versions-200",
        title: "4 KiB random reads of an image with 200 versions, beside the same bytes as one version",
        run: versions::run,
    },
    StreamCase {
        name: "slow-link",
        title: "what the guest reads while it boots, without its pauses, over 100 Mbit/s and 2 ms each way",
        run: replay::run,
    },
    StreamCase {
        name: "guest-slow-link",
        title: "the guest boots over 100 Mbit/s and 2 ms each way, beside an image on this host",
        run: guests::slow_link,
    },
    StreamCase {
        name: "guest-failover",
        title: "one of two servers dies or hangs while the guest boots over that line",
        run: guests::failover,
    },
    StreamCase {
        name: guests::SEAL_PAUSE,
        title: "a version is made of the guest while it runs: how long its file systems stand still, at most",
        run: guests::seal_pause,
    },
];

/// Adds a figure of one round to the comparison of this name.
struct Rounds(Vec<Comparison>);

impl Rounds {
    fn new() -> Self {
        Self(Vec::new())
    }

    fn add(&mut self, like: Comparison) {
        let same = |known: &&mut Comparison| known.figure == like.figure && known.peer == like.peer;
        match self.0.iter_mut().find(same) {
            Some(known) => {
                known.ours.extend(like.ours);
                known.theirs.extend(like.theirs);
            }
            None => self.0.push(like),
        }
    }
}

/// Bytes as MiB, for figures.
pub fn mib(bytes: u64) -> f64 {
    u32::try_from(bytes >> 10).map_or(f64::MAX, |kib| f64::from(kib) / 1024.0)
}

/// Refuses where the guest's image is not there.
pub fn need_guest(plan: &Plan) -> Result<(), Unavailable> {
    if plan.image.is_file() {
        return Ok(());
    }
    Err(Unavailable(format!("there is no {}; `make guest` builds it", plan.image.display())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_of_one_figure_come_together() {
        let one = |figure, ours| Comparison {
            case: "c",
            figure,
            ours: vec![ours],
            peer: "p".into(),
            theirs: vec![1.0],
            goal: Goal::AtLeast(1.0),
        };
        let mut rounds = Rounds::new();
        [one("a", 1.0), one("b", 2.0), one("a", 3.0)].into_iter().for_each(|figure| rounds.add(figure));
        assert_eq!(rounds.0.len(), 2);
        assert_eq!((&rounds.0[0].ours[..], &rounds.0[0].theirs[..]), (&[1.0, 3.0][..], &[1.0, 1.0][..]));
        assert!((mib(3 << 19) - 1.5).abs() < 1e-9);
    }
}

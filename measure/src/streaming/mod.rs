//! Benchmarks of reading images: by many readers, over a network, over a slow link, and by booting guests. Each
//! module measures one claim.
//!
//! | module | claim |
//! |---|---|
//! | [`storm`] | many readers cause the store to read the image once, and cost the server no more CPU than a plain file |
//! | [`remote`] | reading from a server over TLS is as fast as from a disk |
//! | [`versions`] | an image with 200 versions is read as fast as an image with one |
//! | [`replay`] | with a boot trace, a boot over a slow link takes hardly longer than transferring its data |
//! | [`guests`] | a guest boots over a slow link; it continues to boot if one of two servers fails; it pauses only briefly while its disk is sealed as a version |

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

/// Our results, and a peer's results or a target value.
#[derive(Clone, Debug, Serialize)]
pub struct Comparison {
    /// The case.
    pub case: &'static str,
    /// The figure that is compared, with its unit.
    pub figure: &'static str,
    /// Our results, one for each round.
    pub ours: Vec<f64>,
    /// The name of the peer or target.
    pub peer: String,
    /// The peer's results, one for each round, or the target value.
    pub theirs: Vec<f64>,
    /// The goal for the ratio of the medians.
    pub goal: Goal,
}

/// One case of this module.
pub struct StreamCase {
    /// Name for `--only`.
    pub name: &'static str,
    /// Title of the case.
    pub title: &'static str,
    /// Measures the case. [`Unavailable`] if this host lacks something that it needs.
    pub run: fn(&Plan) -> Result<Vec<Comparison>>,
}

/// All cases of this module.
pub const CASES: [StreamCase; 8] = [
    StreamCase {
        name: "storm-cold",
        title: "32 readers of the same 300 MB of an image, nothing in the chunk cache, from a store on this host",
        run: storm::cold,
    },
    StreamCase {
        name: "storm-warm",
        title: "16 readers of a 2 GiB image over NBD on TCP, in the chunk cache, against nbdkit and qemu-nbd with a file in the page cache",
        run: storm::warm,
    },
    StreamCase {
        name: "remote-tls",
        title: "one sequential reader of an image on a server over TLS, nothing cached",
        run: remote::run,
    },
    StreamCase {
        name: "versions-200",
        title: "4 KiB random reads of an image with 200 versions, against the same bytes as one version",
        run: versions::run,
    },
    StreamCase {
        name: "slow-link",
        title: "the reads of a booting guest without pauses in between, over 100 Mbit/s and 2 ms each way",
        run: replay::run,
    },
    StreamCase {
        name: "guest-slow-link",
        title: "the guest boots over 100 Mbit/s and 2 ms each way, against an image on this host",
        run: guests::slow_link,
    },
    StreamCase {
        name: "guest-failover",
        title: "one of two servers dies or hangs while the guest boots over that line",
        run: guests::failover,
    },
    StreamCase {
        name: guests::SEAL_PAUSE,
        title: "the disk of a running guest is sealed as a version: how long its file systems are frozen",
        run: guests::seal_pause,
    },
];

/// Collects the figures of several rounds, by the name of the figure.
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

/// Bytes in MiB, for figures.
pub fn mib(bytes: u64) -> f64 {
    u32::try_from(bytes >> 10).map_or(f64::MAX, |kib| f64::from(kib) / 1024.0)
}

/// Fails if the guest's image is missing.
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

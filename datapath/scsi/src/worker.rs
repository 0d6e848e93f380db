//! The thread that continues tasks of several steps. A device's completion must not block, but the next step
//! may.
//!
//! The thread is started by the first such task of a logical unit, and ends with the unit. Most units never
//! start it.

use std::sync::mpsc;

use parking_lot::{Mutex, MutexGuard};

/// A piece of work.
pub(crate) type Job = Box<dyn FnOnce() + Send>;

/// The thread of one logical unit.
#[derive(Debug, Default)]
pub(crate) struct Worker {
    sender: Mutex<Option<mpsc::Sender<Job>>>,
}

impl Worker {
    /// Runs `job` on the worker's thread. There is at most one job for each task in the set, which limits
    /// their number.
    pub(crate) fn post(&self, job: Job) {
        let mut sender = self.started();
        let rejected = match sender.as_ref() {
            Some(sender) => sender.send(job).err().map(|error| error.0),
            None => Some(job),
        };
        if rejected.is_some() {
            *sender = None;
        }
        drop(sender);
        if let Some(job) = rejected {
            job();
        }
    }

    /// Whether jobs run on another thread than the caller's.
    pub(crate) fn is_there(&self) -> bool {
        self.started().is_some()
    }

    fn started(&self) -> MutexGuard<'_, Option<mpsc::Sender<Job>>> {
        let mut sender = self.sender.lock();
        if sender.is_none() {
            *sender = start();
        }
        sender
    }
}

fn start() -> Option<mpsc::Sender<Job>> {
    let (sender, receiver) = mpsc::channel::<Job>();
    let spawned = std::thread::Builder::new().name("scsi-steps".into()).spawn(move || {
        for job in receiver {
            job();
        }
    });
    match spawned {
        Ok(_) => Some(sender),
        Err(error) => {
            tracing::warn!(
                "SCSI: cannot start the thread for commands of several steps ({error}); they continue on the \
                 threads of the device"
            );
            None
        }
    }
}

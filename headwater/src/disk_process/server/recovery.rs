//! Takes over the disks of the disk process before this one, which crashed or was replaced.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use headwater_service::backend::OpenDisk;
use parking_lot::Mutex;
use uuid::Uuid;

use super::{Entry, Shared};
use crate::adapters::disks::Volumes;
use crate::disk_process::keeper;
use crate::disk_process::kept::{Handed, LeftDisk};
use crate::disk_process::protocol::Failure;
use crate::logging;

/// The pause between two attempts to open the store, while machines wait for their disks.
const RECOVER_PAUSE: Duration = Duration::from_secs(1);

/// Disks that are taken over at a time: a persistent disk waits for the disk of the host.
const RECOVER_THREADS: usize = 16;

/// How long a disk is served before the next one is taken over, if one of them may be why disk processes crash. QEMU connects within a
/// second, and sends again what had no answer.
const CAREFUL_PAUSE: Duration = Duration::from_millis(1500);

/// Ends a program that was tried. The disks that it serves already go back to the keeper, persistent ones after they are saved; the
/// keeper still has the others.
fn go_back(volumes: &Volumes) -> ! {
    volumes.hand_over();
    logging::flush();
    std::process::exit(1);
}

impl Shared {
    /// Takes over the disks of the process before this one.
    pub(super) fn recover(&self, left: Handed) {
        let begun = Instant::now();
        let left = left.disks();
        if left.is_empty() {
            // The daemon may not even have made the store.
            return;
        }
        while let Err(error) = self.open_store() {
            // Without the store no disk can be served. The machines wait.
            tracing::warn!(
                "cannot open the store to take the disks over, so the machines wait; trying again: {error:#}"
            );
            std::thread::sleep(RECOVER_PAUSE);
            if self.is_ending.load(Ordering::SeqCst) {
                return;
            }
        }
        let Ok(volumes) = self.volumes() else { return };
        if keeper::is_careful() {
            let mut left = left.into_iter().peekable();
            while let Some((uuid, disk)) = left.next() {
                // If the keeper has ended, nobody asks which disk it was.
                let _ = self.keeper.takes_over(Some(uuid));
                if !self.take_over(&volumes, uuid, disk) {
                    go_back(&volumes);
                }
                if left.peek().is_some() {
                    let pause_s = CAREFUL_PAUSE.as_secs_f64();
                    tracing::warn!(
                        %uuid,
                        "waiting {pause_s} s before the next disk is taken over, because disk processes have crashed repeatedly: a crash in this time points to the disk that was just taken over"
                    );
                }
                std::thread::sleep(CAREFUL_PAUSE);
                let _ = self.keeper.takes_over(None);
            }
        } else {
            let left = Mutex::new(left.into_iter());
            let has_failed = AtomicBool::new(false);
            std::thread::scope(|scope| {
                for _ in 0..RECOVER_THREADS {
                    scope.spawn(|| {
                        let next = || left.lock().next();
                        while let Some((uuid, left)) = next().filter(|_| !has_failed.load(Ordering::SeqCst)) {
                            if !self.take_over(&volumes, uuid, left) {
                                has_failed.store(true, Ordering::SeqCst);
                            }
                            // A sign of progress: the keeper waits for the next disk.
                            let _ = self.keeper.takes_over(None);
                        }
                    });
                }
            });
            if has_failed.load(Ordering::SeqCst) {
                go_back(&volumes);
            }
        }
        let (disks, took_ms) = (self.disks.lock().len(), begun.elapsed().as_millis());
        tracing::info!(disks, took_ms, "all disks of the process before this one are taken over");
    }

    /// Takes one disk over, or has the log say why that is not possible. False: the program from before must serve all disks again.
    fn take_over(&self, volumes: &Volumes, uuid: Uuid, left: anyhow::Result<LeftDisk>) -> bool {
        match left.and_then(|left| self.recover_disk(volumes, left)) {
            Ok(machine) => tracing::info!(machine, "its disk is taken over"),
            // The keeper has told this process to give its disks back.
            Err(_) if volumes.is_handed_over() => return false,
            Err(error) if keeper::is_tried() => {
                tracing::error!(%uuid, "this program cannot take a disk over, so the program from before serves again: {error:#}");
                return false;
            }
            Err(error) => {
                tracing::error!(%uuid, "a disk is lost with the disk process that had it: {error:#}");
                // The file is given up as it is.
                let _ = self.keeper.forget(uuid);
            }
        }
        true
    }

    fn recover_disk(&self, volumes: &Volumes, left: LeftDisk) -> anyhow::Result<String> {
        let (uuid, request) = (left.request.uuid, &left.request);
        let (machine, version) = (request.machine.clone(), request.version.clone());
        let is_persistent = request.kept.is_some();
        let _runtime = self.runtime.enter();
        let disk = volumes.recover(left).map_err(|error| Failure::from(&error).into_problem())?;
        let info = OpenDisk { machine: machine.clone(), uuid, version };
        self.disks.lock().insert(uuid, Entry { info, disk, is_persistent });
        Ok(machine)
    }
}

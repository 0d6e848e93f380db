//! ublk: a block device whose requests come to this process through io_uring.
//!
//! ```text
//!   ADD_DEV --> SET_PARAMS --> queue threads FETCH --> START_DEV ==> /dev/ublkbN
//!   server dies --> (recoverable: QUIESCED, requests wait) --> START_USER_RECOVERY --> FETCH --> END_USER_RECOVERY
//!   STOP_DEV --> queues see ABORT and end --> DEL_DEV_ASYNC, which does not wait until the device is closed and unmounted
//! ```
//!
//! The kernel stores the mark of the attach ([`Mark`]) with the device, as its server flags: by these flags a later
//! process knows that the device is of this product, and whose. `abi` has the kernel's interface as bytes, `control` the
//! commands to `/dev/ublk-control`, `queue` the thread of a queue, and `memory` the memory of a queue.

mod abi;
mod control;
mod memory;
mod queue;

use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use headwater_block::{Device, FaultLog};
use parking_lot::Mutex;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use self::abi::{Info, State};
use self::control::Control;
use self::queue::{Queue, Setup};
use crate::error::{AttachError, System};
use crate::mark::{Mark, Owner};
use crate::{Options, Way};

/// How long udev may take to make the device file, and the kernel to notice that a server is dead.
const DEVICE_TIMEOUT: Duration = Duration::from_secs(10);
/// How long the number of an unused device may take to become free, and how often that is checked.
const FREE_TIMEOUT: Duration = Duration::from_secs(2);
const FREE_CHECK_EVERY: Duration = Duration::from_millis(10);

/// A ublk device with its server.
pub(crate) struct Ublk {
    number: u32,
    mark: Mark,
    queues: Mutex<Vec<JoinHandle<()>>>,
}

/// Checks that the kernel has ublk; the error says why not.
pub(crate) fn is_there() -> Result<(), String> {
    let control = Path::new("/dev/ublk-control");
    if !control.exists() {
        crate::load_module("ublk_drv");
    }
    if !control.exists() {
        return Err(
            "this kernel has no ublk (there is no /dev/ublk-control, also after modprobe ublk_drv)".into()
        );
    }
    // The command passes no device information, so no kernel adds a device.
    let asked = Control::open().and_then(|mut control| control.command(abi::ADD_DEV, u32::MAX, 0));
    knows_commands(asked)
}

/// Whether the kernel knows these command numbers, judged by its answer to [`abi::ADD_DEV`] without device
/// information.
fn knows_commands(answer: std::io::Result<()>) -> Result<(), String> {
    let Err(error) = answer else { return Ok(()) };
    match error.raw_os_error().map(Errno::from_raw_os_error) {
        // The kernel knows the command and missed the information.
        Some(Errno::INVAL) => Ok(()),
        // Before 6.4 commands had other numbers, and unknown numbers fail with these errors.
        Some(Errno::NODEV | Errno::OPNOTSUPP) => {
            Err("this kernel's ublk is too old (Linux 6.4 is needed)".into())
        }
        _ => Err(format!(
            "cannot use ublk: a command to /dev/ublk-control over io_uring failed: {error} (io_uring may be forbidden: see \
             'sysctl kernel.io_uring_disabled' and the container's seccomp profile)"
        )),
    }
}

impl Ublk {
    /// Makes a device, or takes over one whose server died.
    pub(crate) fn start(device: &Arc<dyn Device>, options: &Options) -> Result<Self, AttachError> {
        let mut control = Control::open().system("open /dev/ublk-control")?;
        let (info, is_resumed) = match options.resume {
            Some(number) => (recover(&mut control, number)?, true),
            None => (add(&mut control, device, options)?, false),
        };
        let number = info.device;
        let started = start_queues(device, options, &info).and_then(|queues| {
            let pid = u64::from(std::process::id());
            let (command, what) = if is_resumed {
                (abi::END_USER_RECOVERY, "end the recovery of the ublk device")
            } else {
                (abi::START_DEV, "start the ublk device")
            };
            control.command(command, number, pid).system(what)?;
            Ok(queues)
        });
        match started {
            Ok(queues) => Ok(Self { number, mark: options.mark, queues: Mutex::new(queues) }),
            Err(error) => {
                if !is_resumed {
                    remove(number);
                }
                Err(error)
            }
        }
    }

    /// Number of the device.
    pub(crate) fn number(&self) -> u32 {
        self.number
    }

    /// Whether the queues have ended: the device was removed by another program.
    pub(crate) fn is_gone(&self) -> bool {
        self.queues.lock().iter().all(JoinHandle::is_finished)
    }

    /// Removes the device and ends the threads. `false`: the device may still exist.
    pub(crate) fn stop(&self) -> bool {
        let queues = std::mem::take(&mut *self.queues.lock());
        if queues.is_empty() {
            return true;
        }
        // The device may have been removed and its number given to another one; then the queues have ended. A
        // running queue has the device open, so the kernel gives its number to no other device.
        let is_running = queues.iter().any(|queue| !queue.is_finished());
        let owner = owner(self.number, &self.mark);
        if owner == Owner::Ours || (owner == Owner::Unknown && is_running) {
            let stop = |mut control: Control| control.command(abi::STOP_DEV, self.number, 0);
            if let Err(error) = Control::open().and_then(stop) {
                tracing::warn!("attach: cannot stop ublk device {}: {error}", self.number);
                if is_running {
                    // Joining these threads could wait for ever; they end with the process.
                    return false;
                }
            }
        }
        for queue in queues {
            if queue.join().is_err() {
                tracing::error!("attach: a queue of ublk device {} has panicked", self.number);
            }
        }
        crate::remove(Way::Ublk, self.number, &self.mark) != Owner::Unknown
    }
}

/// Whether the device, whose server is dead, waits for another one; `None`: the kernel did not say.
pub(crate) fn is_waiting(number: u32, mark: &Mark) -> Option<bool> {
    is_waiting_by(Control::open().and_then(|mut control| control.information(number)), mark)
}

/// Like [`is_waiting`], from the kernel's answer.
fn is_waiting_by(info: std::io::Result<Info>, mark: &Mark) -> Option<bool> {
    let is_kept = info.as_ref().is_ok_and(|info| match info.state() {
        State::Quiesced => true,
        // The kernel has not noticed the server's death yet: before Linux 6.7 that takes up to 5 s if there
        // are no requests.
        State::Live => info.flags & abi::F_USER_RECOVERY != 0,
        State::Dead | State::Other(_) => false,
    });
    match owner_by(info, mark) {
        Owner::Ours => Some(is_kept),
        Owner::Others | Owner::Nobody => Some(false),
        Owner::Unknown => None,
    }
}

/// The owner of the device, with or without a server.
pub(crate) fn owner(number: u32, mark: &Mark) -> Owner {
    owner_by(Control::open().and_then(|mut control| control.information(number)), mark)
}

/// Like [`owner`], from the kernel's answer.
fn owner_by(info: std::io::Result<Info>, mark: &Mark) -> Owner {
    match info {
        Ok(info) if info.server_flags == mark.number() => Owner::Ours,
        Ok(_) => Owner::Others,
        Err(error) if is_no_device(&error) => Owner::Nobody,
        // Without ublk there are no devices.
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Owner::Nobody,
        Err(_) => Owner::Unknown,
    }
}

/// Removes a device, with or without a server. The caller has checked the owner. Programs that still use the
/// device get errors, and are not waited for: the kernel frees the number when the last one closes it.
/// `false`: the removal failed.
pub(crate) fn remove(number: u32) -> bool {
    let removed = Control::open().and_then(|mut control| {
        // The command fails if the device has stopped already.
        let _ = control.command(abi::STOP_DEV, number, 0);
        match control.command(abi::DEL_DEV_ASYNC, number, 0) {
            Ok(()) => Ok(is_free_soon(&mut control, number)),
            Err(error) if is_no_device(&error) => Ok(true),
            // Kernels before 6.9 do not have the command.
            Err(_) => delete_aside(control, number),
        }
    });
    match removed {
        Ok(true) => true,
        Ok(false) => {
            tracing::info!(
                "attach: ublk device {number} is removed; the number is free when its last user closes it"
            );
            true
        }
        Err(error) => {
            tracing::warn!("attach: cannot remove ublk device {number}: {error}");
            false
        }
    }
}

/// Whether a removed device ends soon, as it does if no program uses it. Its number may then be given to
/// another device.
fn is_free_soon(control: &mut Control, number: u32) -> bool {
    let start = Instant::now();
    while control.information(number).is_ok() {
        if start.elapsed() > FREE_TIMEOUT {
            return false;
        }
        std::thread::sleep(FREE_CHECK_EVERY);
    }
    true
}

/// Removes a device with the command that waits for its last user, on a thread of its own, which is waited
/// for only as long as in [`is_free_soon`]. Returns whether the device has ended.
fn delete_aside(mut control: Control, number: u32) -> std::io::Result<bool> {
    let (told, outcome) = mpsc::channel();
    let work = move || drop(told.send(control.command(abi::DEL_DEV, number, 0)));
    std::thread::Builder::new().name("ublk-delete".into()).spawn(work)?;
    match outcome.recv_timeout(FREE_TIMEOUT) {
        Ok(Err(error)) if !is_no_device(&error) => Err(error),
        Ok(_) => Ok(true),
        Err(_) => Ok(false),
    }
}

fn is_no_device(error: &std::io::Error) -> bool {
    error.raw_os_error() == Some(Errno::NODEV.raw_os_error())
}

fn add(control: &mut Control, device: &Arc<dyn Device>, options: &Options) -> Result<Info, AttachError> {
    let recovery = abi::F_USER_RECOVERY | abi::F_USER_RECOVERY_REISSUE;
    let wanted = Info {
        queues: options.queues.max(1),
        depth: options.depth.clamp(1, 1024),
        state: 0,
        max_io_bytes: options.max_io_bytes,
        device: options.number.unwrap_or(u32::MAX),
        pid: 0,
        flags: abi::F_CMD_IOCTL_ENCODE | if options.survives { recovery } else { 0 },
        server_flags: options.mark.number(),
    };
    let info = control.add(&wanted).map_err(|error| match (error.raw_os_error(), options.number) {
        (Some(code), Some(number)) if code == Errno::EXIST.raw_os_error() => {
            AttachError::Taken { device: format!("/dev/ublkb{number}") }
        }
        _ => AttachError::System { what: "make a ublk device".into(), source: error },
    })?;
    let parameters = abi::parameters(&device.geometry(), info.max_io_bytes);
    if let Err(source) = control.set_parameters(info.device, parameters) {
        remove(info.device);
        return Err(AttachError::System { what: "set the size of the ublk device".into(), source });
    }
    Ok(info)
}

fn recover(control: &mut Control, number: u32) -> Result<Info, AttachError> {
    let start = Instant::now();
    loop {
        // The kernel may not have noticed the server's death yet.
        match control.command(abi::START_USER_RECOVERY, number, 0) {
            Ok(()) => break,
            Err(error)
                if error.raw_os_error() == Some(Errno::BUSY.raw_os_error())
                    && start.elapsed() < DEVICE_TIMEOUT =>
            {
                std::thread::sleep(Duration::from_millis(50));
            }
            Err(source) => {
                let what = format!("recover /dev/ublkb{number}");
                return Err(AttachError::System { what, source });
            }
        }
    }
    control.information(number).system("read the ublk device's information")
}

/// Starts the threads; all rings exist when this returns.
fn start_queues(
    device: &Arc<dyn Device>,
    options: &Options,
    info: &Info,
) -> Result<Vec<JoinHandle<()>>, AttachError> {
    let character = Arc::new(open_character(info.device)?);
    let (ready, outcomes) = mpsc::channel();
    let mut threads = Vec::new();
    let faults = Arc::new(FaultLog::new("attach", options.warnings_per_10_s));
    for queue in 0..info.queues {
        let setup = Setup {
            device: Arc::clone(device),
            character: Arc::clone(&character),
            queue,
            depth: info.depth,
            max_io_bytes: info.max_io_bytes,
            name: Way::Ublk.device(info.device),
            faults: Arc::clone(&faults),
        };
        let ready = ready.clone();
        // The kernel demands that all commands of a queue come from the thread that serves it.
        let work = move || {
            let name = setup.name.clone();
            let served = match Queue::new(setup) {
                Ok(queue) => {
                    let _ = ready.send(Ok(()));
                    queue.run()
                }
                Err(error) => {
                    let _ = ready.send(Err(error));
                    return;
                }
            };
            if let Err(error) = served {
                tracing::error!("attach: a queue of {name} has ended: {error}");
            }
        };
        let thread = std::thread::Builder::new().name("ublk-queue".into()).spawn(work);
        threads.push(thread.system("start a thread")?);
    }
    drop(ready);
    for outcome in outcomes.iter().take(usize::from(info.queues)) {
        outcome.system("prepare a queue of the ublk device")?;
    }
    Ok(threads)
}

fn open_character(number: u32) -> Result<OwnedFd, AttachError> {
    let path = format!("/dev/ublkc{number}");
    let start = Instant::now();
    loop {
        match rustix::fs::open(&path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()) {
            Ok(device) => return Ok(device),
            Err(Errno::NOENT | Errno::ACCESS | Errno::BUSY) if start.elapsed() < DEVICE_TIMEOUT => {
                std::thread::sleep(Duration::from_millis(10));
            }
            Err(errno) => {
                return Err(AttachError::System { what: format!("open {path}"), source: errno.into() });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_ours_by_its_mark() {
        let mark = Mark { pid: 10, thread: 12, started: 500 };
        let info = |server_flags| {
            let mut bytes = [0; abi::INFO_BYTES];
            bytes[32..40].copy_from_slice(&u64::to_ne_bytes(server_flags));
            Info::decode(&bytes)
        };
        assert_eq!(owner_by(Ok(info(mark.number())), &mark), Owner::Ours);
        for other in [Mark { pid: 11, ..mark }, Mark { started: 501, ..mark }] {
            assert_eq!(owner_by(Ok(info(other.number())), &mark), Owner::Others);
        }
        assert_eq!(owner_by(Ok(info(0)), &mark), Owner::Others);
        assert_eq!(owner_by(Err(Errno::NODEV.into()), &mark), Owner::Nobody);
        assert_eq!(owner_by(Err(Errno::NOENT.into()), &mark), Owner::Nobody);
    }

    #[test]
    fn a_device_waits_for_another_server_also_before_the_kernel_notices_that_its_own_is_dead() {
        let mark = Mark { pid: 10, thread: 12, started: 500 };
        let recovery = abi::F_USER_RECOVERY | abi::F_USER_RECOVERY_REISSUE;
        let info = |state: u16, flags: u64, server_flags: u64| {
            let mut bytes = [0; abi::INFO_BYTES];
            bytes[4..6].copy_from_slice(&state.to_ne_bytes());
            bytes[24..32].copy_from_slice(&(flags | abi::F_CMD_IOCTL_ENCODE).to_ne_bytes());
            bytes[32..40].copy_from_slice(&server_flags.to_ne_bytes());
            Ok(Info::decode(&bytes))
        };
        let (dead, live, quiesced) = (0, 1, 2);
        for (state, flags, waits) in
            [(quiesced, recovery, true), (live, recovery, true), (live, 0, false), (dead, recovery, false)]
        {
            assert_eq!(
                is_waiting_by(info(state, flags, mark.number()), &mark),
                Some(waits),
                "{state} {flags}"
            );
        }
        let other = Mark { pid: 11, ..mark };
        assert_eq!(is_waiting_by(info(live, recovery, other.number()), &mark), Some(false));
    }

    #[test]
    fn a_kernel_that_looks_at_a_command_knows_it() {
        assert_eq!(knows_commands(Err(Errno::INVAL.into())), Ok(()));
        for errno in [Errno::NODEV, Errno::OPNOTSUPP] {
            assert!(knows_commands(Err(errno.into())).unwrap_err().contains("6.4"), "{errno}");
        }
        assert!(knows_commands(Err(Errno::PERM.into())).unwrap_err().contains("cannot use ublk"));
    }

    #[test]
    fn what_the_kernel_does_not_say_is_unknown() {
        let mark = Mark { pid: 10, thread: 12, started: 500 };
        for errno in [Errno::PERM, Errno::ACCESS, Errno::MFILE, Errno::NOMEM, Errno::INTR] {
            assert_eq!(owner_by(Err(errno.into()), &mark), Owner::Unknown, "{errno}");
            assert_eq!(is_waiting_by(Err(errno.into()), &mark), None, "{errno}");
        }
        assert_eq!(is_waiting_by(Err(Errno::NODEV.into()), &mark), Some(false));
    }
}

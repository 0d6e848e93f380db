//! Commands to `/dev/ublk-control`, one at a time.
#![expect(unsafe_code, reason = "commands point to memory, which only the caller of io_uring can vouch for")]

use std::os::fd::{AsRawFd, OwnedFd};

use io_uring::{IoUring, cqueue, opcode, squeue, types};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use super::abi::{self, INFO_BYTES, Info, PARAMS_BYTES};

/// The control device.
pub(super) struct Control {
    device: OwnedFd,
    ring: IoUring<squeue::Entry128, cqueue::Entry>,
}

impl Control {
    pub(super) fn open() -> std::io::Result<Self> {
        let device = rustix::fs::open("/dev/ublk-control", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
        let ring = IoUring::<squeue::Entry128, cqueue::Entry>::builder().build(4)?;
        Ok(Self { device, ring })
    }

    /// Adds a device. The kernel fills in its number and the features that it grants.
    pub(super) fn add(&mut self, wanted: &Info) -> std::io::Result<Info> {
        let mut memory = Box::new(wanted.encode());
        self.with_memory(abi::ADD_DEV, wanted.device, &mut memory[..], 0)?;
        Ok(Info::decode(&memory))
    }

    pub(super) fn information(&mut self, device: u32) -> std::io::Result<Info> {
        let mut memory = Box::new([0; INFO_BYTES]);
        self.with_memory(abi::GET_DEV_INFO, device, &mut memory[..], 0)?;
        Ok(Info::decode(&memory))
    }

    pub(super) fn set_parameters(
        &mut self,
        device: u32,
        parameters: [u8; PARAMS_BYTES],
    ) -> std::io::Result<()> {
        let mut memory = Box::new(parameters);
        self.with_memory(abi::SET_PARAMS, device, &mut memory[..], 0)
    }

    /// Runs a command that passes no memory.
    pub(super) fn command(&mut self, command: u32, device: u32, data: u64) -> std::io::Result<()> {
        self.with_memory(command, device, &mut [], data)
    }

    fn with_memory(
        &mut self,
        command: u32,
        device: u32,
        memory: &mut [u8],
        data: u64,
    ) -> std::io::Result<()> {
        let len = u16::try_from(memory.len()).unwrap_or(0);
        let address =
            if memory.is_empty() { 0 } else { u64::try_from(memory.as_mut_ptr().addr()).unwrap_or(0) };
        let bytes = abi::control_command(device, address, len, data);
        let entry = opcode::UringCmd80::new(types::Fd(self.device.as_raw_fd()), command).cmd(bytes).build();
        // SAFETY: `memory` outlives the command, because this function waits for its completion below and holds the
        // borrow until then; the kernel reads and writes at most `len` bytes there. The descriptor is ours and open.
        unsafe { self.ring.submission().push(&entry) }.map_err(std::io::Error::other)?;
        let result = loop {
            match self.ring.submit_and_wait(1) {
                Ok(_) => {}
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
            if let Some(completion) = self.ring.completion().next() {
                break completion.result();
            }
        };
        if result < 0 { Err(Errno::from_raw_os_error(result.saturating_neg()).into()) } else { Ok(()) }
    }
}

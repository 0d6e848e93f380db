//! Submits a request and waits for its answer. For tools, import, export and tests, never for front-ends.

use std::sync::mpsc;

use crate::completion::Completion;
use crate::device::{Attempt, Device, Op, Request};
use crate::error::{IoError, IoErrorKind};
use crate::range::ByteRange;

/// Submits a request and waits for its answer. Returns the request's buffer.
pub fn wait(device: &dyn Device, request: Request) -> Result<Vec<u8>, IoError> {
    let (tx, rx) = mpsc::sync_channel(1);
    device.submit(
        request,
        Completion::new(move |outcome| {
            // The receiver lives until it got this message.
            let _ = tx.send(outcome);
        }),
    );
    let outcome = rx
        .recv()
        .map_err(|e| IoError::with_source(IoErrorKind::Device, "the request was never answered", e))?;
    outcome.result.map(|()| outcome.buffer)
}

/// Reads `into.len()` bytes at `offset`.
pub fn read(device: &dyn Device, offset: u64, into: &mut [u8]) -> Result<(), IoError> {
    let range = checked(device, offset, into.len())?;
    match device.try_now(Op::Read { range, into })? {
        Attempt::Done => Ok(()),
        Attempt::MustWait => {
            let buffer = wait(device, Request::Read { range, buffer: vec![0; into.len()] })?;
            into.copy_from_slice(&buffer);
            Ok(())
        }
    }
}

/// Writes `from` at `offset`.
pub fn write(device: &dyn Device, offset: u64, from: &[u8]) -> Result<(), IoError> {
    let range = checked(device, offset, from.len())?;
    match device.try_now(Op::Write { range, from, fua: false })? {
        Attempt::Done => Ok(()),
        Attempt::MustWait => {
            wait(device, Request::Write { range, buffer: from.to_vec(), fua: false }).map(drop)
        }
    }
}

/// Discards `len` bytes at `offset`.
pub fn discard(device: &dyn Device, offset: u64, len: u64) -> Result<(), IoError> {
    let range = ByteRange::new(offset, len)
        .ok_or_else(|| IoError::new(IoErrorKind::Invalid, "range past 64 bits"))?;
    device.geometry().check(range)?;
    match device.try_now(Op::Discard { range })? {
        Attempt::Done => Ok(()),
        Attempt::MustWait => wait(device, Request::Discard { range }).map(drop),
    }
}

/// Writes zeroes over `len` bytes at `offset`, and frees their space if possible.
pub fn write_zeroes(device: &dyn Device, offset: u64, len: u64) -> Result<(), IoError> {
    let range = ByteRange::new(offset, len)
        .ok_or_else(|| IoError::new(IoErrorKind::Invalid, "range past 64 bits"))?;
    device.geometry().check(range)?;
    match device.try_now(Op::WriteZeroes { range, may_unmap: true, fua: false })? {
        Attempt::Done => Ok(()),
        Attempt::MustWait => {
            wait(device, Request::WriteZeroes { range, may_unmap: true, fua: false }).map(drop)
        }
    }
}

/// Flushes.
pub fn flush(device: &dyn Device) -> Result<(), IoError> {
    match device.try_now(Op::Flush)? {
        Attempt::Done => Ok(()),
        Attempt::MustWait => wait(device, Request::Flush).map(drop),
    }
}

fn checked(device: &dyn Device, offset: u64, len: usize) -> Result<ByteRange, IoError> {
    let range = u64::try_from(len)
        .ok()
        .and_then(|len| ByteRange::new(offset, len))
        .ok_or_else(|| IoError::new(IoErrorKind::Invalid, "range past 64 bits"))?;
    device.geometry().check_data(range)?;
    Ok(range)
}

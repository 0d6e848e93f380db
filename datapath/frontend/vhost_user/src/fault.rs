//! Errors that a guest can make with its rings.

/// The rings of a queue are invalid. The queue is stopped until the machine resets its disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum RingFault {
    #[error("the queue has {0} entries; it must be a power of two up to {max}", max = crate::queue::QUEUE_SIZE)]
    QueueSize(u16),
    #[error("the {name} at {addr:#x} is not aligned or not in the machine's memory")]
    RingAddress { name: &'static str, addr: u64 },
    #[error("the available index went {0} entries ahead, more than the queue has")]
    IndexJump(u16),
    #[error("descriptor {0} is not in the table")]
    DescriptorIndex(u16),
    #[error("a chain of descriptors is longer than its table: it has a loop")]
    Loop,
    #[error("an indirect table is inside another indirect table, or has a next descriptor")]
    NestedIndirect,
    #[error("an indirect table has {0} bytes, which is not a valid length")]
    IndirectLength(u32),
    #[error("the indirect table at {0:#x} is not in the machine's memory")]
    IndirectAddress(u64),
    #[error("the driver used an indirect table, which was not negotiated")]
    IndirectForbidden,
    #[error("a request has a buffer to read after a buffer to write")]
    Order,
    #[error("a request has no byte for its status, or this byte is not in the machine's memory")]
    NoStatus,
    #[error("the kick descriptor is broken")]
    Kick,
}

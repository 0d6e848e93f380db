//! Errors that a guest can make with its rings.

/// The rings of a queue are invalid. The queue is stopped until the machine resets its disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum RingFault {
    #[error("a queue of {0} entries; it must be a power of two up to {max}", max = crate::queue::QUEUE_SIZE)]
    QueueSize(u16),
    #[error("the {name} at {addr:#x} is not aligned or not in the machine's memory")]
    RingAddress { name: &'static str, addr: u64 },
    #[error("the available index went {0} entries ahead, more than the queue has")]
    IndexJump(u16),
    #[error("descriptor {0} is not in the table")]
    DescriptorIndex(u16),
    #[error("a chain of descriptors is longer than its table: it has a loop")]
    Loop,
    #[error("an indirect table inside an indirect table, or one with a next descriptor")]
    NestedIndirect,
    #[error("an indirect table of {0} bytes")]
    IndirectLength(u32),
    #[error("an indirect table at {0:#x}, which is not in the machine's memory")]
    IndirectAddress(u64),
    #[error("an indirect table, which was not negotiated")]
    IndirectForbidden,
    #[error("a buffer to read after a buffer to write")]
    Order,
    #[error("a request without a byte for its status, or with one that is not in the machine's memory")]
    NoStatus,
    #[error("the kick descriptor is broken")]
    Kick,
}

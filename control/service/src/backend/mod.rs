//! Traits through which the control plane uses the data plane and the host: images, disks, a hypervisor, clouds,
//! identity providers, a clock, random numbers.
//!
//! The adapters that implement them with the real crates live in `headwater/`, the only crate that sees both
//! planes.

mod alarm_channel;
mod cloud;
mod disks;
mod error;
mod hypervisor;
mod images;
mod people;
mod surroundings;
mod task_control;
mod wake;

pub use alarm_channel::{AlarmChannel, AlarmMessage};
pub use cloud::{
    Cloud, CloudFacts, CloudMachines, CloudOrder, CloudStarted, CloudState, ProvisioningAgent, PublishCheck,
    PublishOrder, UnpublishOrder,
};
pub use disks::{
    Disk, DiskRequest, Disks, FrozenDisk, Given, IdentityLeft, NOTE_MAX_BYTES, OpenDisk, PersistentDiskRef,
    PersistentDiskRequest, SealOrder, SealOutcome, Shortage,
};
pub use error::BackendError;
pub use hypervisor::{ExecOutput, Hypervisor, LeftVm, Vm, VmExit, VmPlan, VmRequest};
pub use images::{
    Images, ImportOrder, ImportOutcome, Listed, Promoted, Promotion, PullOrder, PullOutcome, Pulled,
    RetentionPurpose, RetentionRoot, ServersGone,
};
pub use people::{Attempt, IdentityProvider, Person};
pub use surroundings::{Clock, Random, SystemClock, SystemRandom};
pub use task_control::TaskControl;
pub use wake::Wake;

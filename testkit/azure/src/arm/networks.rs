//! Network interfaces: when one can be deleted.

use super::management::Management;
use super::{Refusal, refuse};

impl Management {
    /// Checks that no machine uses a NIC, and that the NIC is not reserved.
    pub(super) fn check_free(&self, nic: &str) -> Result<(), Refusal> {
        let user = self.resources.get(nic).and_then(|it| it.pointer("/properties/virtualMachine/id"));
        if let Some(user) = user.and_then(|it| it.as_str()).filter(|it| self.resources.contains_key(*it)) {
            return refuse(400, "NicInUse", format!("{nic} is used by {user}"));
        }
        if self.reserved_for(nic).is_some() {
            let what = "Nic(s) in request is reserved for another Virtual Machine for 180 seconds. Please provide \
                        another nic(s) or retry after 180 seconds.";
            return refuse(400, "NicReservedForAnotherVm", what);
        }
        Ok(())
    }
}

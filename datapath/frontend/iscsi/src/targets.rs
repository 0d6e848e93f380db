//! The targets that a server offers, and the initiators that may use them.

use std::sync::Arc;

use crate::login::chap::Accounts;
use crate::name::IscsiName;

/// A target as it is offered to one initiator.
#[derive(Clone, Debug)]
pub struct Offer {
    /// The SCSI device behind it.
    pub scsi: Arc<headwater_scsi::Target>,
    /// Shown by initiators; may be empty.
    pub alias: String,
    /// Accounts that may log in; `None`: no login is needed.
    pub accounts: Option<Arc<Accounts>>,
}

/// Why a target is not offered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Denied {
    /// There is no target of that name.
    NotFound,
    /// This initiator may not use it.
    Forbidden,
    /// It was removed.
    Removed,
}

/// What a server offers. Called on connections' threads, in logins and discoveries.
pub trait Targets: Send + Sync + 'static {
    /// The names that this initiator may see.
    fn names(&self, initiator: &IscsiName) -> Vec<IscsiName>;

    /// The target of that name, for this initiator.
    fn open(&self, target: &IscsiName, initiator: &IscsiName) -> Result<Offer, Denied>;

    /// Accounts that may list the names; `None`: no login is needed.
    fn discovery_accounts(&self) -> Option<Arc<Accounts>>;
}

/// Targets that stay the same while the server runs. Anyone who may log in to one of them may request the
/// names of all.
pub struct FixedTargets(Vec<(IscsiName, Offer)>);

impl FixedTargets {
    /// These targets, and no others.
    pub fn new(targets: Vec<(IscsiName, Offer)>) -> Arc<Self> {
        Arc::new(Self(targets))
    }
}

impl Targets for FixedTargets {
    fn names(&self, _initiator: &IscsiName) -> Vec<IscsiName> {
        self.0.iter().map(|(name, _)| name.clone()).collect()
    }

    fn open(&self, target: &IscsiName, _initiator: &IscsiName) -> Result<Offer, Denied> {
        let found = self.0.iter().find(|(name, _)| name == target);
        found.map(|(_, offer)| offer.clone()).ok_or(Denied::NotFound)
    }

    fn discovery_accounts(&self) -> Option<Arc<Accounts>> {
        let mut all = Accounts::default();
        for (_, offer) in &self.0 {
            // If one target needs no login, discovery needs none either.
            let accounts = offer.accounts.as_ref()?;
            all.target = all.target.or_else(|| accounts.target.clone());
            let new = accounts.initiators.iter().filter(|initiator| !all.initiators.contains(initiator));
            let new: Vec<_> = new.cloned().collect();
            all.initiators.extend(new);
        }
        (!self.0.is_empty()).then(|| Arc::new(all))
    }
}

//! The sizes that the region offers, their capacity, and the quota of the subscription.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::management::Management;
use super::{Refusal, refuse};

/// A size of virtual machines.
#[derive(Clone, Debug, Default)]
pub struct Size {
    /// Its name.
    pub name: String,
    /// Its family, which has a quota.
    pub family: String,
    /// Its vCPUs.
    pub vcpus: u64,
    /// Zones that have the size.
    pub zones: Vec<String>,
    /// Other capabilities of the Resource SKUs API, such as `CachedDiskBytes`.
    pub capabilities: Vec<(String, String)>,
    /// Whether the subscription cannot use the size.
    pub is_restricted: bool,
    /// How many more machines of the size a zone can hold; the zone is empty for machines without a zone. A zone
    /// without an entry has no limit.
    pub capacity: BTreeMap<String, usize>,
}

impl Size {
    /// A size with local placements, in zones 1, 2 and 3.
    pub fn new(name: &str, family: &str, vcpus: u64, placements: &str) -> Self {
        let mut capabilities = Vec::new();
        if !placements.is_empty() {
            capabilities.push(("EphemeralOSDiskSupported".to_owned(), "True".to_owned()));
            capabilities.push(("SupportedEphemeralOSDiskPlacements".to_owned(), placements.to_owned()));
        }
        Self {
            name: name.to_owned(),
            family: family.to_owned(),
            vcpus,
            zones: ["1", "2", "3"].map(str::to_owned).to_vec(),
            capabilities,
            ..Self::default()
        }
    }

    fn capability(&self, name: &str) -> Option<&str> {
        self.capabilities.iter().find(|it| it.0 == name).map(|it| it.1.as_str())
    }

    fn sku(&self, region: &str) -> Value {
        let mut capabilities = vec![json!({"name": "vCPUs", "value": self.vcpus.to_string()})];
        let others = self.capabilities.iter();
        capabilities.extend(others.map(|(name, value)| json!({"name": name, "value": value})));
        let restrictions = if self.is_restricted {
            json!([{
                "type": "Location", "values": [region], "restrictionInfo": {"locations": [region]},
                "reasonCode": "NotAvailableForSubscription",
            }])
        } else {
            json!([])
        };
        json!({
            "resourceType": "virtualMachines", "name": self.name, "family": self.family, "locations": [region],
            "locationInfo": [{"location": region, "zones": self.zones, "zoneDetails": []}],
            "capabilities": capabilities, "restrictions": restrictions,
        })
    }
}

/// The quota of a family.
#[derive(Clone, Copy, Debug)]
pub struct Family {
    /// The most vCPUs.
    pub limit: u64,
}

impl Management {
    /// One page of the sizes, among resources of other kinds.
    pub(super) fn skus(&self, region: &str) -> Vec<Value> {
        let mut skus = vec![json!({
            "resourceType": "disks", "name": "Premium_LRS", "locations": [region], "capabilities": [],
            "restrictions": [],
        })];
        skus.extend(self.sizes.iter().map(|size| size.sku(region)));
        skus
    }

    pub(super) fn usages(&self) -> Vec<Value> {
        let families = self.families.iter();
        families
            .map(|(name, family)| {
                json!({
                    "unit": "Count", "currentValue": self.used(name), "limit": family.limit,
                    "name": {"value": name, "localizedValue": name},
                })
            })
            .collect()
    }

    fn used(&self, family: &str) -> u64 {
        let of_family = |size: &&Size| size.family == family;
        let vcpus = |vm: &Value| {
            let name = vm.pointer("/properties/hardwareProfile/vmSize").and_then(Value::as_str);
            self.sizes
                .iter()
                .filter(of_family)
                .find(|size| Some(size.name.as_str()) == name)
                .map(|it| it.vcpus)
        };
        let machines = self.resources.iter().filter(|it| it.0.contains("/virtualMachines/"));
        machines.filter_map(|(_, vm)| vcpus(vm)).sum()
    }

    /// Checks a new machine against the offers. Any size is offered if the test has named none.
    pub(super) fn check_offer(&self, vm: &Value) -> Result<(), Refusal> {
        let name =
            vm.pointer("/properties/hardwareProfile/vmSize").and_then(Value::as_str).unwrap_or_default();
        if self.sizes.is_empty() {
            return Ok(());
        }
        let Some(size) = self.sizes.iter().find(|size| size.name == name) else {
            return refuse(
                400,
                "InvalidParameter",
                format!("The value {name} of parameter vmSize is invalid"),
            );
        };
        let zone = vm.pointer("/zones/0").and_then(Value::as_str);
        if size.is_restricted || zone.is_some_and(|zone| !size.zones.iter().any(|it| it == zone)) {
            let what = format!("The requested size {name} is currently not available in location or zone");
            return refuse(409, "SkuNotAvailable", what);
        }
        if let Some(placement) = vm.pointer("/properties/storageProfile/osDisk/diffDiskSettings/placement") {
            let offered = size.capability("SupportedEphemeralOSDiskPlacements").unwrap_or_default();
            if !offered.split(',').any(|it| Some(it) == placement.as_str()) {
                return refuse(400, "InvalidParameter", format!("{name} does not support {placement}"));
            }
        }
        let Some(family) = self.families.get(&size.family) else { return Ok(()) };
        let used = self.used(&size.family);
        if used + size.vcpus > family.limit {
            let (family_name, limit, more) = (&size.family, family.limit, size.vcpus);
            let what = format!(
                "Operation could not be completed as it results in exceeding approved {family_name} Cores quota. \
                 Additional details - Deployment Model: Resource Manager, Location: westeurope, Current Limit: {limit}, \
                 Current Usage: {used}, Additional Required: {more}, (Minimum) New Limit Required: {}.",
                used + more
            );
            return refuse(409, "OperationNotAllowed", what);
        }
        Ok(())
    }

    /// Takes a place of the size in the machine's zone. Returns the error of the operation if there is none.
    pub(super) fn allocate(&mut self, vm: &Value) -> Option<Value> {
        let name = vm.pointer("/properties/hardwareProfile/vmSize").and_then(Value::as_str);
        let zone = vm.pointer("/zones/0").and_then(Value::as_str).unwrap_or_default();
        let size = self.sizes.iter_mut().find(|size| Some(size.name.as_str()) == name)?;
        let left = size.capacity.get_mut(zone)?;
        if *left > 0 {
            *left -= 1;
            return None;
        }
        let code = if zone.is_empty() { "AllocationFailed" } else { "ZonalAllocationFailed" };
        Some(
            json!({"code": code, "message": "Allocation failed. We do not have sufficient capacity for the requested VM size"}),
        )
    }
}

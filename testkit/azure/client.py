"""Drives the fake Azure with Microsoft's Python SDK, so that the fake is not only a reflection of our client.

usage: client.py FAKE_SERVER    (the program headwater-testkit-azure; needs the package azure-mgmt-compute)
"""

import json
import subprocess
import sys
import urllib.request

from azure.core.credentials import AccessToken
from azure.core.exceptions import HttpResponseError, ResourceNotFoundError
from azure.core.pipeline.policies import HeadersPolicy
from azure.mgmt.compute import ComputeManagementClient

GROUP = "g"
SCOPE = f"/subscriptions/s/resourceGroups/{GROUP}/providers"


class Credential:
    """The SDK needs a credential; the token is sent by another policy."""

    def get_token(self, *scopes, **options):
        return AccessToken("unused", 4102444800)


def control(url, path, body=b""):
    with urllib.request.urlopen(urllib.request.Request(url + path, data=body, method="POST")) as answer:
        return json.load(answer)


def put(url, token, path, body):
    request = urllib.request.Request(url + path + "?api-version=2024-05-01", data=json.dumps(body).encode(), method="PUT")
    request.add_header("Authorization", f"Bearer {token}")
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


def refused(code, call):
    try:
        call()
    except HttpResponseError as error:
        assert error.error.code == code, f"{error.error.code} instead of {code}"
        return
    raise AssertionError(f"{code} was expected")


def gallery(client, url):
    """An upload disk, a gallery, a definition and a version; returns the identifier of the version."""
    size = (20 << 20) + 512
    disk = client.disks.begin_create_or_update(GROUP, "upload", {
        "location": "westeurope", "sku": {"name": "Standard_LRS"},
        "properties": {"osType": "Linux", "hyperVGeneration": "V2",
                       "creationData": {"createOption": "Upload", "uploadSizeBytes": size}}}).result()
    assert disk.disk_state == "ReadyToUpload", disk.disk_state
    access = client.disks.begin_grant_access(
        GROUP, "upload", {"access": "Write", "durationInSeconds": 86400}).result()
    assert access.access_sas.startswith(url + "/blobs/"), access.access_sas
    # The upload has no footer, so Azure refuses its end. A footer is written, and then the end succeeds.
    refused("InvalidVhd", lambda: client.disks.begin_revoke_access(GROUP, "upload").result())
    access = client.disks.begin_grant_access(
        GROUP, "upload", {"access": "Write", "durationInSeconds": 86400}).result()
    write_footer(access.access_sas, size)
    client.disks.begin_revoke_access(GROUP, "upload").result()
    assert client.disks.get(GROUP, "upload").disk_state == "Unattached"
    client.galleries.begin_create_or_update(GROUP, "hw", {"location": "westeurope", "properties": {}}).result()
    client.gallery_images.begin_create_or_update(GROUP, "hw", "debian", {
        "location": "westeurope", "properties": {
            "osType": "Linux", "osState": "Generalized", "hyperVGeneration": "V2",
            "identifier": {"publisher": "p", "offer": "o", "sku": "s"}}}).result()
    version = client.gallery_image_versions.begin_create_or_update(GROUP, "hw", "debian", "1.0.4", {
        "location": "westeurope", "properties": {
            "publishingProfile": {"targetRegions": [{"name": "westeurope", "regionalReplicaCount": 1}]},
            "storageProfile": {"osDiskImage": {"source": {"id": disk.id}}}}}).result()
    shown = client.gallery_image_versions.get(GROUP, "hw", "debian", "1.0.4", expand="ReplicationStatus")
    assert shown.replication_status.aggregated_state == "Completed", shown.replication_status
    assert [it.name for it in client.gallery_image_versions.list_by_gallery_image(GROUP, "hw", "debian")] == ["1.0.4"]
    return version.id


def write_footer(sas, size):
    import base64
    import hashlib
    page = b"conectix".ljust(512, b"\0")
    request = urllib.request.Request(sas + "&comp=page", data=page, method="PUT")
    for name, value in {
        "x-ms-version": "2021-12-02", "x-ms-page-write": "update", "x-ms-range": f"bytes={size - 512}-{size - 1}",
        "content-md5": base64.b64encode(hashlib.md5(page).digest()).decode(),
    }.items():
        request.add_header(name, value)
    with urllib.request.urlopen(request) as answer:
        assert answer.status == 201, answer.status


def machine(image):
    return {
        "location": "westeurope", "tags": {"team": "lab"}, "properties": {
            "hardwareProfile": {"vmSize": "Standard_D8ds_v5"},
            "storageProfile": {
                "imageReference": {"id": image},
                "osDisk": {"createOption": "FromImage", "caching": "ReadOnly", "deleteOption": "Delete",
                           "diffDiskSettings": {"option": "Local", "placement": "ResourceDisk"}}},
            "osProfile": {"computerName": "desk-1", "adminUsername": "hw", "customData": "YQ==",
                          "linuxConfiguration": {"disablePasswordAuthentication": True}},
            "networkProfile": {"networkInterfaces": [
                {"id": f"{SCOPE}/Microsoft.Network/networkInterfaces/nic", "properties": {"primary": True}}]}}}


def machines(client, url, token, image):
    put(url, token, f"{SCOPE}/Microsoft.Network/networkInterfaces/nic", {"location": "westeurope", "properties": {}})
    vms = client.virtual_machines
    wrong = machine(image)
    wrong["properties"]["storageProfile"]["osDisk"]["caching"] = "ReadWrite"
    refused("InvalidParameter", lambda: vms.begin_create_or_update(GROUP, "desk", wrong))
    wrong = machine(image)
    wrong["properties"]["storageProfile"]["osDisk"]["diffDiskSettings"]["placement"] = "CacheDisk"
    refused("InvalidParameter", lambda: vms.begin_create_or_update(GROUP, "desk", wrong))
    control(url, "/fake/throttle-next")
    made = vms.begin_create_or_update(GROUP, "desk", machine(image)).result()
    assert made.provisioning_state == "Succeeded", made.provisioning_state
    assert made.os_profile.custom_data is None, "Azure never shows custom data"
    first = vms.get(GROUP, "desk", expand="instanceView")
    powers = [it.code for it in first.instance_view.statuses if it.code.startswith("PowerState/")]
    assert powers == ["PowerState/running"], powers
    vms.begin_reimage(GROUP, "desk", {"tempDisk": False}).result()
    refused("PropertyChangeNotAllowed", lambda: vms.begin_reimage(GROUP, "desk", {"osProfile": {"customData": "Yg=="}}))
    vms.begin_restart(GROUP, "desk").result()
    refused("OperationNotAllowed", lambda: vms.begin_deallocate(GROUP, "desk"))
    vms.begin_power_off(GROUP, "desk", skip_shutdown=True).result()
    codes = [it.code for it in vms.instance_view(GROUP, "desk").statuses]
    assert "PowerState/stopped" in codes, codes
    vms.begin_start(GROUP, "desk").result()
    assert vms.get(GROUP, "desk").vm_id == first.vm_id
    assert [it.name for it in vms.list(GROUP)] == ["desk"]
    vms.begin_delete(GROUP, "desk", force_deletion=True).result()
    try:
        vms.get(GROUP, "desk")
        raise AssertionError("the machine still exists")
    except ResourceNotFoundError:
        pass


def main():
    server = subprocess.Popen([sys.argv[1]], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        url = server.stdout.readline().strip()
        token = control(url, "/tenant/oauth2/v2.0/token")["access_token"]
        # The SDK's own policy refuses to send a token without TLS.
        client = ComputeManagementClient(
            Credential(), "s", base_url=url, authentication_policy=HeadersPolicy({"Authorization": f"Bearer {token}"}))
        image = gallery(client, url)
        machines(client, url, token, image)
        sizes = [it.name for it in client.resource_skus.list() if it.resource_type == "virtualMachines"]
        assert sizes == ["Standard_D8ds_v5"], sizes
        client.gallery_image_versions.begin_delete(GROUP, "hw", "debian", "1.0.4").result()
        requests = control(url, "/fake/log")
        statuses = sorted({it["status"] for it in requests})
        assert 429 in statuses and 500 not in statuses, statuses
        print(f"Microsoft's SDK made {len(requests)} requests to the fake, and got what it expects")
    finally:
        server.stdin.close()
        server.wait(10)


main()
